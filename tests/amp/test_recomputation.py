"""Laws of backward: recomputation, functions of a user's own and double backward are in the level."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampexp.amp import auto_mixed_precision
from tests.amp.low import LOW_LEVELS, WIDE, built


class Checkpointed(nn.Module):
    def __init__(self, variant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(4, 8)
        self.block = nn.Sequential(
            nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.GELU(), nn.BatchNorm1d(8, momentum=None), nn.Dropout(0.3),
        )  # fmt: skip
        self.head = nn.Linear(8, 3)
        self.variant = variant

    def inner(self, x: Tensor) -> Tensor:
        return Scale.apply(self.block(x)) + self.head.weight.sum()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.variant is None:
            return self.head(self.inner(x))
        return self.head(checkpoint(self.inner, x, use_reentrant=self.variant))


class Scale(torch.autograd.Function):
    """A user's function whose forward runs without gradient, in recomputation too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 0.3333).relu() * 3.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.gt(0) * (x * 0.3333).cos()


@pytest.mark.parametrize("variant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_recomputation_is_in_the_level(level: str, variant: bool) -> None:
    """Gradients are bitwise those of the network without checkpoints."""
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    gradients = []
    for kind in (None, variant):
        network = Checkpointed(kind)
        train_network = built(network, level)
        torch.manual_seed(9)
        train_network(x, y)
        gradients.append([p.grad.clone() for p in network.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


class Nested(nn.Module):
    """A checkpoint inside a checkpoint: the inner one runs without gradient while the outer is recomputed."""

    def __init__(self, variant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softplus()) for _ in range(3)
        )
        self.variant = variant

    def call(self, function: Any, x: Tensor) -> Tensor:
        return (
            function(x)
            if self.variant is None
            else checkpoint(function, x, use_reentrant=self.variant)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        return self.call(lambda a: self.call(third, second(a)).exp(), first(x))


@pytest.mark.filterwarnings(
    "ignore:None of the inputs have requires_grad"
)  # PyTorch, of the inner one
@pytest.mark.parametrize("variant", [True, False], ids=["reentrant", "non_reentrant"])
@pytest.mark.parametrize("level", LOW_LEVELS)
def test_nested_recomputation_is_in_the_level(level: str, variant: bool) -> None:
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    gradients = []
    for kind in (None, variant):
        network = Nested(kind)
        built(network, level)(x, y)
        gradients.append([p.grad.clone() for p in network.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_double_backward_by_hand_in_the_scope(level: str) -> None:
    """A training loop of one's own around `auto_mixed_precision`, with a gradient penalty."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    cast, x = auto_mixed_precision(network, level), torch.randn(5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(cast(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    penalty = [p.grad.clone() for p in network.parameters() if p.grad is not None]
    network.zero_grad()
    (exact,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    exact.square().sum().backward()
    wide = [p.grad for p in network.parameters() if p.grad is not None]
    assert any(not torch.equal(a, b) for a, b in zip(penalty, wide, strict=True))
    for a, b in zip(penalty, wide, strict=True):
        assert a.dtype == WIDE
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
