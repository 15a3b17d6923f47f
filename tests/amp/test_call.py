"""Laws of one call: what goes where, what is a loss, what comes back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampexp.amp import (
    DynamicLossScaleManager,
    build_train_network,
)
from tests.amp.kit import (
    INF,
    ON_CPU,
    assert_equal,
    build,
    linear,
    sgd,
)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_step_output(level: str) -> None:
    train_network = build(level=level, **ON_CPU)
    output = train_network(torch.randn(5, 4), torch.arange(5) % 3)
    assert type(output).__name__ == "StepOutput"
    assert output._fields == ("loss", "overflow", "loss_scale")
    assert [value.dtype for value in output] == [torch.float32, torch.bool, torch.float32]
    assert [value.shape for value in output] == [torch.Size([])] * 3
    assert {value.device for value in output} == {torch.device("cpu")}
    assert not any(value.requires_grad for value in output)


def test_inputs_label_and_keywords() -> None:
    seen: list[Any] = []

    class Takes(nn.Linear):
        def forward(self, x: Any, y: Any, *, z: Any) -> Tensor:
            seen.extend([x, y, z])
            return super().forward(x[0])

    def loss_fn(output: Tensor, label: Any) -> Tensor:
        seen.append(label)
        return output.sum()

    x, y, z, label = [torch.ones(2, 4)], (1, 2), object(), {"label": "text"}
    build(Takes(4, 3), loss_fn)(x, y, label, z=z)
    assert all(a is b for a, b in zip(seen, [x, y, z, label], strict=True))


class GivesLoss(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.head = linear()
        self.factor = factor

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.output = self.head(x)
        loss = F.mse_loss(self.output, y) * self.factor
        with torch._C.DisableTorchFunction():
            self.dtype = loss.dtype
        return loss


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_without_loss_fn_the_network_gives_the_loss(level: str) -> None:
    network = GivesLoss()
    train_network = build_train_network(network, sgd(network), level=level, **ON_CPU)
    output = train_network(torch.randn(5, 4), torch.zeros(5, 3))
    assert network.dtype == (torch.float16 if level in ("O2", "O3") else torch.float32)
    assert output.loss.dtype == torch.float32
    assert torch.equal(output.loss.half().float(), output.loss) == (level in ("O2", "O3"))


def test_a_loss_that_is_not_finite_is_an_overflow() -> None:
    network = GivesLoss(INF)
    arguments = {"loss_scale_manager": DynamicLossScaleManager(8.0), **ON_CPU}
    train_network = build_train_network(network, sgd(network), **arguments)
    before = copy.deepcopy(network.state_dict())
    assert train_network(torch.randn(5, 4), torch.zeros(5, 3)).overflow.item() is True
    assert_equal(list(before.values()), list(network.state_dict().values()))


LOSSES = {
    "tensor": lambda output: output.sum(),
    "tuple": lambda output: (output.sum(), "other"),
    "dict": lambda output: {"other": 1, "loss": output.sum()},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    network = linear()
    x = torch.randn(5, 4)
    output = build(network, lambda out, _: LOSSES[name](out))(x, None)
    assert torch.equal(output.loss, linear()(x).sum().detach())


WRONG_LOSSES = {
    "vector": (lambda output: output.sum(0), r"shape \(3,\) of torch\.float32"),
    "one": (lambda output: output.sum().view(1), r"shape \(1,\)"),
    "integer": (lambda output: output.sum().long(), r"of torch\.int64"),
    "number": (lambda output: 1.0, "got float"),
    "list": (lambda output: [output.sum()], "got list"),
    "none": (lambda output: None, "got NoneType"),
    "empty": (lambda output: (), "got tuple"),
    "no loss": (lambda output: {"other": output.sum()}, "got dict"),
    "detached": (lambda output: output.sum().detach(), "without a gradient"),
}


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_wrong_losses_are_named(name: str) -> None:
    loss, words = WRONG_LOSSES[name]
    with pytest.raises(TypeError, match=rf"the loss must .*{words}"):
        build(linear(), lambda out, _: loss(out))(torch.randn(5, 4), None)


def test_the_label_is_missing() -> None:
    with pytest.raises(TypeError, match="needs the label"):
        build()()
    with pytest.raises(TypeError, match="needs the label"):
        build()(input=torch.randn(5, 4))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_parameters_of_the_loss_stay_float32_and_train(level: str) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 1 / 3))

        def forward(self, output: Tensor, label: Tensor) -> Tensor:
            self.inside = (output.dtype, (output @ self.weight).dtype)
            assert torch.equal(self.weight.relu(), self.weight)  # no cast reaches the loss
            return (output @ self.weight - label).square().mean()

    network, loss_fn = linear(), Weighted()
    optimizer = torch.optim.SGD([*network.parameters(), *loss_fn.parameters()], lr=0.1)
    train_network = build_train_network(
        network, optimizer, loss_fn, level=level, loss_scale_manager=None
    )
    train_network(torch.randn(5, 4), torch.zeros(5))
    assert loss_fn.inside == (torch.float32, torch.float32)
    assert loss_fn.weight.dtype == torch.float32
    assert not torch.equal(loss_fn.weight, torch.full((3,), 1 / 3))


def test_all_gradients_of_the_network_are_cleared() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(network[1].parameters(), lr=0.0)
    train_network = build_train_network(network, optimizer, nn.CrossEntropyLoss())
    gradients = []
    for _ in range(2):
        train_network(torch.ones(5, 4), torch.arange(5) % 3)
        gradients.append(network[0].weight.grad.clone())
    assert torch.equal(*gradients)
