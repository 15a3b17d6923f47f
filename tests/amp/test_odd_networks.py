"""What careless and clever networks do inside forward, at every level: the same as at O0 up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampexp.amp import PrecisionError, build_train_network

LEVELS: dict[str, dict[str, Any]] = {
    "O1": {"level": "O1"},
    "O2": {"level": "O2", "loss_scale_manager": None},
    "O3": {"level": "O3"},
    "bfloat16": {"level": "O3", "cast_model_type": torch.bfloat16},
}
TOLERANCE = {"O1": 2e-3, "O2": 5e-3, "O3": 5e-3, "bfloat16": 4e-2}


class Odd(nn.Module):
    """A dense layer around something odd: `act(network, x)` of (8, 6) gives (8, 6)."""

    def __init__(self, act: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.act = act
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self, self.first(x)))


def trained(act: Callable[[Odd, Tensor], Tensor], num_steps: int = 3, **arguments: Any) -> tuple[list[float], Odd]:
    torch.manual_seed(0)
    network = Odd(act)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss(), **arguments)
    x, label = torch.randn(8, 6), torch.arange(8) % 3
    losses = [train_network(x, label).loss.item() for _ in range(num_steps)]
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    assert {buffer.dtype for buffer in network.buffers()} == {torch.float32}
    return losses, network


def mask_of(x: Tensor) -> Tensor:
    return torch.arange(6).expand_as(x) > 3


def own_statistics(function: Callable[..., Any]) -> Callable[[Odd, Tensor], Tensor]:
    def act(network: Odd, x: Tensor) -> Tensor:
        result = function(x, None, None, running_mean=network.mean, running_var=network.var)
        return result[0] if isinstance(result, tuple) else result

    return act


@torch.library.custom_op("ampexp_tests::accumulate", mutates_args=("total",))
def accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x)


def momentum_encoder(network: Odd, x: Tensor) -> Tensor:
    for slow, fast in zip(network.second.parameters(), network.first.parameters(), strict=True):
        slow.data = slow.data * 0.5 + fast.data * 0.5
    return x + network.second(x).detach()


def custom_operator(network: Odd, x: Tensor) -> Tensor:
    accumulate(network.mean, x.detach().mean(0))
    return x + network.mean


def rotary(network: Odd, x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones(8, 3), torch.arange(24.0).view(8, 3) / 24)
    turned = torch.view_as_complex(x.float().reshape(8, 3, 2)) * turns
    assert turned.dtype == torch.complex64
    return torch.view_as_real(turned).flatten(1).type_as(x)


def imaginary(network: Odd, x: Tensor) -> Tensor:
    z = 1j * x
    assert z.dtype == torch.complex64
    return torch.exp(z).real


def kept_state(network: Odd, x: Tensor) -> Tensor:
    network.state = (x.detach(), {"a": 1})
    return x


def initialised(network: Odd, x: Tensor) -> Tensor:
    nn.init.normal_(network.second.weight)
    with torch.no_grad():
        nn.init.uniform_(network.mean)
    return x + network.second.weight.detach()[0] * network.mean


ACTS: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "comparison with a number": lambda network, x: x * (torch.arange(6) == 2).logical_not(),
    "distributions": lambda network, x: x + torch.distributions.Normal(x, 1.0).log_prob(x).detach(),
    "gumbel noise": lambda network, x: x - torch.log(-torch.log(torch.rand(8, 6000).clamp(min=1e-6))).mean(),
    "rows drawn": lambda network, x: x + network.mean[(torch.rand(8, 20000) * 6).long()].mean(),
    "uniform": lambda network, x: x + network.mean[(torch.empty(20000).uniform_() * 6).long()].mean(),
    "batch_norm by keyword": own_statistics(
        lambda *given, **named: torch.batch_norm(*given, **named, training=True, momentum=0.1, eps=1e-5,
                                                 cudnn_enabled=False)  # fmt: skip
    ),
    "native_batch_norm": lambda network, x: torch.native_batch_norm(
        x, None, None, network.mean, network.var, True, 0.1, 1e-5
    )[0],
    "aten batch norm": lambda network, x: torch.ops.aten._native_batch_norm_legit(
        x, None, None, network.mean, network.var, True, 0.1, 1e-5
    )[0],
    "momentum encoder": momentum_encoder,
    "custom operator": custom_operator,
    "rotary embedding": rotary,
    "imaginary number": imaginary,
    "kept state": kept_state,
    "initialised inside": initialised,
    "normalize": lambda network, x: F.normalize(x * (torch.arange(8) > 0)[:, None], dim=1),
    "cosine": lambda network, x: F.cosine_similarity(
        x[:, :, None] * (torch.arange(8) > 0)[:, None, None], x[:, None, :].expand(8, 6, 6), dim=1
    ),
    "clamp then log": lambda network, x: F.relu(x).clamp(min=1e-12).clamp(min=1e-3).log(),
    "mask of an integer": lambda network, x: x.masked_fill(mask_of(x), -(10**9)).softmax(1),
    "mask of a NumPy number": lambda network, x: x.masked_fill(mask_of(x), np.float64(-1e9)).softmax(1),
    "mask of NumPy's least": lambda network, x: x.masked_fill(mask_of(x), np.finfo(np.float32).min).softmax(1),
    "mask of iinfo": lambda network, x: x.masked_fill(mask_of(x), torch.iinfo(torch.int32).min).softmax(1),
    "padding with an integer": lambda network, x: F.pad(x[:, :4], (0, 2), value=-(10**9)).softmax(1),
    "integers stay": lambda network, x: x + (torch.full((6,), 10**6) == 10**6),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ACTS)
def test_the_same_as_at_o0_up_to_rounding(name: str, level: str) -> None:
    reference, original = trained(ACTS[name], level="O0")
    losses, network = trained(ACTS[name], **LEVELS[level])
    assert losses == pytest.approx(reference, rel=TOLERANCE[level], abs=TOLERANCE[level])
    for buffer, other in zip(network.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(buffer, other, rtol=4 * TOLERANCE[level], atol=2 * TOLERANCE[level])


@pytest.mark.parametrize("level", LEVELS)
def test_a_state_kept_on_the_network_is_float32_afterwards(level: str) -> None:
    _, network = trained(kept_state, **LEVELS[level])
    assert network.state[0].dtype == torch.float32
    assert network.state[1] == {"a": 1}
    assert not network.state[0].requires_grad


@pytest.mark.parametrize("level", ["O2", "O3", "bfloat16"])
def test_an_operator_with_a_wrong_low_kernel_is_refused_by_name(level: str) -> None:
    def orthogonal(network: Odd, x: Tensor) -> Tensor:
        return x @ torch.matrix_exp(network.second.weight)

    trained(orthogonal, level="O1")
    with pytest.raises(PrecisionError, match=r"network \(Odd\): matrix_exp cannot compute in b?float16"):
        trained(orthogonal, **LEVELS[level])
