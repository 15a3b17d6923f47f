"""Small networks, batches and builds that the tests of the train network share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ampexp.amp import (
    build_train_network,
)

INF = float("inf")
ON_CPU = {"cpu_loss_scaling": True}


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def mixed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8),
        nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(6, 1, 6, 6, generator=generator), torch.arange(6) % 3


def build(network: nn.Module | None = None, loss_fn: Any = None, **kwargs: Any) -> Any:
    network = linear() if network is None else network
    return build_train_network(network, sgd(network), loss_fn or nn.CrossEntropyLoss(), **kwargs)


def weighted(output: Tensor, weight: Tensor) -> Tensor:
    """A loss that the label makes infinite."""
    return (output.square() * weight).mean()


FINE, BAD = torch.tensor(1.0), torch.tensor(INF)


def trained(network: nn.Module, **kwargs: Any) -> list[Tensor]:
    train_network = build(network, **kwargs)
    losses = [train_network(*batch()).loss for _ in range(3)]
    return [*losses, *network.state_dict().values()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
