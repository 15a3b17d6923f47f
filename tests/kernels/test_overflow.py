"""float16 ends at 65504, and a sum that passes it overflows where float16 does, though it was computed in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampexp.amp import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    auto_mixed_precision,
    build_train_network,
)

INF = float("inf")
EDGE = [
    ((65504.0,), 65504.0),
    ((65504.0, 15.0), 65504.0),  # 65519 rounds down
    ((65504.0, 15.0, 0.984375), 65504.0),  # 65519.98 too
    ((65504.0, 16.0), INF),  # 65520 is half way, and rounds to what float16 does not have
    ((65504.0, 16.0, -1.0), 65504.0),  # 65519 once more: what is on the way does not count
    ((65504.0, 65504.0, -65504.0), 65504.0),
    ((-65504.0, -15.0), -65504.0),
    ((-65504.0, -16.0), -INF),
]
"""Parts of a sum, and what the sum is in float16."""


class Summing(nn.Module):
    """A hidden layer that sums its inputs, by each way to products."""

    def __init__(self, way: str, width: int) -> None:
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(torch.ones(1, width))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "linear":
            return nn.functional.linear(x, self.weight)
        if self.way == "matmul":
            return x @ self.weight.t()
        if self.way == "conv1d":
            return nn.functional.conv1d(x[:, None], self.weight[None]).flatten(1)
        return torch.einsum("bi,oi->bo", x, self.weight)


WAYS = pytest.mark.parametrize("way", ["linear", "matmul", "conv1d", "einsum"])


@WAYS
@pytest.mark.parametrize(("parts", "total"), EDGE)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_sum_overflows_where_float16_does(
    level: str, parts: tuple[float, ...], total: float, way: str
) -> None:
    x = torch.tensor([parts]).half().float()
    cast = auto_mixed_precision(Summing(way, len(parts)), level)
    assert cast(x).item() == total
    assert auto_mixed_precision(Summing(way, len(parts)), level, torch.bfloat16)(x).isfinite().all()


@WAYS
@pytest.mark.parametrize(("last", "overflows"), [(15.0, False), (16.0, True)])
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_step_says_so_exactly_then(level: str, last: float, overflows: bool, way: str) -> None:
    network = Summing(way, 2)
    step = build_train_network(
        network, torch.optim.SGD(network.parameters(), lr=0.0), lambda y, label: (y * label).mean(), level,
        loss_scale_manager=FixedLossScaleManager(1.0), cpu_loss_scaling=True,
    )  # fmt: skip
    out = step(torch.tensor([[65504.0, last]]), torch.tensor(2.0**-16))
    assert bool(out.overflow) == overflows
    assert bool(out.loss.isfinite()) != overflows
    assert step.num_skipped_steps == int(overflows)


@WAYS
def test_subnormal_numbers_are_kept(way: str) -> None:
    least = 2.0**-24
    cast = auto_mixed_precision(Summing(way, 2), "O3")
    assert cast(torch.tensor([[least, least]])).item() == 2 * least
    assert cast(torch.tensor([[least, 0.0]])).item() == least


def trained(level: str, **kwargs: Any) -> tuple[list[float], list[bool], list[float], nn.Module]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 16), nn.GELU(), nn.Linear(16, 3))
    step = build_train_network(
        network, torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9), nn.CrossEntropyLoss(), level,
        cpu_loss_scaling=True, **kwargs,
    )  # fmt: skip
    x = torch.randn(48, 1, 8)
    y = (x.sum((1, 2)) > 0).long() + (x[:, 0, 0] > 0.5).long()
    outs = [step(x, y) for _ in range(60)]
    return (
        [float(out.loss) for out in outs],
        [bool(out.overflow) for out in outs],
        [float(out.loss_scale) for out in outs],
        network,
    )


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_scale_that_overflows_shrinks_until_training_works(level: str) -> None:
    manager = DynamicLossScaleManager(init_loss_scale=2**30, scale_window=1000)
    losses, overflows, scales, network = trained(level, loss_scale_manager=manager)
    assert all(overflows[:5])
    assert sum(overflows) < 20
    for index in range(59):
        assert scales[index + 1] == scales[index] / (2 if overflows[index] else 1)
        assert (losses[index + 1] == losses[index]) == overflows[index]  # a skipped step moves nothing
    assert losses[-1] < losses[0] / 2
    assert all(p.isfinite().all() and p.dtype is torch.float32 for p in network.parameters())


def test_a_small_scale_never_overflows() -> None:
    manager = DynamicLossScaleManager(init_loss_scale=128, scale_window=1000)
    losses, overflows, _, _ = trained("O2", loss_scale_manager=manager)
    assert not any(overflows)
    assert losses[-1] < losses[0] / 2
