"""Laws of a step under a loss scale: unscaling, overflow, and what a skipped step leaves as it was."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampexp.amp import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    LossScaleManager,
    build_train_network,
)
from tests.amp.kit import (
    BAD,
    FINE,
    INF,
    ON_CPU,
    assert_equal,
    build,
    linear,
    sgd,
    weighted,
)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_unscaled_whichever_manager_it_is(sparse: bool) -> None:
    """A power of two leaves float32 gradients bitwise as they are without a scale."""
    networks = []
    for manager in (
        None,
        FixedLossScaleManager(64, False),
        FixedLossScaleManager(1024),
        DynamicLossScaleManager(2**16),
    ):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Flatten(), nn.Linear(12, 3))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        train_network = build_train_network(
            network, optimizer, nn.CrossEntropyLoss(), loss_scale_manager=manager, **ON_CPU
        )
        outputs = [
            train_network(torch.arange(15).view(5, 3) % 7, torch.arange(5) % 3) for _ in range(3)
        ]
        assert not any(output.overflow for output in outputs)
        networks.append([*network.parameters(), *(output.loss for output in outputs)])
    for other in networks[1:]:
        assert_equal(networks[0], other)


def test_an_infinite_sparse_gradient_is_an_overflow() -> None:
    network = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Flatten())
    network[0].weight.register_hook(lambda grad: grad * INF)
    train_network = build_train_network(
        network, torch.optim.SGD(network.parameters(), lr=0.1), nn.CrossEntropyLoss(),
        loss_scale_manager=DynamicLossScaleManager(8.0), **ON_CPU,
    )  # fmt: skip
    before = network[0].weight.detach().clone()
    output = train_network(torch.arange(5)[:, None], torch.arange(5) % 3)
    assert output.overflow.item() is True
    assert torch.equal(network[0].weight, before)


class Counts(nn.Module):
    """A network with every kind of buffer that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = linear()
        self.register_buffer("replaced", torch.zeros(4))
        self.register_buffer("later", None)
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.replaced = self.replaced + x.detach().mean(0)
        self.later = x.detach()[0]
        self.hidden += 1
        return self.head(self.norm(x))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_skipped_step_leaves_everything_as_it_was(level: str) -> None:
    network = Counts()
    optimizer = sgd(network)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train_network = build_train_network(
        network, optimizer, weighted, level=level, scheduler=scheduler,
        loss_scale_manager=DynamicLossScaleManager(16.0), **ON_CPU,
    )  # fmt: skip
    x = torch.randn(5, 4)
    homes = dict(network.named_buffers())
    assert train_network(x, BAD).overflow.item() is True
    assert network.later is None
    assert all(network.get_buffer(name) is home for name, home in homes.items())
    assert network.norm.num_batches_tracked.item() == 0
    assert train_network(x, FINE).overflow.item() is False
    before = copy.deepcopy(
        (network.state_dict(), network.hidden, optimizer.state_dict(), scheduler.state_dict())
    )

    output = train_network(x, BAD)

    assert output.overflow.item() is True
    assert output.loss_scale.item() == 8
    assert train_network.loss_scale.value == 4
    after = (network.state_dict(), network.hidden, optimizer.state_dict(), scheduler.state_dict())
    assert str(after) == str(before)
    assert_equal(list(after[0].values()), list(before[0].values()))
    assert (train_network.num_steps, train_network.num_skipped_steps) == (3, 2)
    assert optimizer.param_groups[0]["lr"] == 0.05
    train_network(x, FINE)
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert network.hidden.item() == 2


def test_a_skipped_step_moves_the_random_stream() -> None:
    network = nn.Sequential(linear(), nn.Dropout(0.5))
    train_network = build(
        network, weighted, loss_scale_manager=DynamicLossScaleManager(16.0), **ON_CPU
    )
    before = torch.get_rng_state()
    train_network(torch.randn(5, 4), BAD)
    assert not torch.equal(torch.get_rng_state(), before)


def test_without_dropping_the_update_is_applied() -> None:
    network = linear()
    train_network = build(network, weighted, loss_scale_manager=FixedLossScaleManager(16, False))
    output = train_network(torch.randn(5, 4), BAD)
    assert output.overflow.item() is True
    assert not torch.isfinite(network.weight).all()
    assert train_network.num_skipped_steps == 0
    assert train_network.loss_scale.value == 16


def test_an_infinite_loss_with_finite_gradients_is_an_overflow() -> None:
    train_network = build(
        loss_fn=lambda output, label: output.mean() + label,
        loss_scale_manager=FixedLossScaleManager(16),
        **ON_CPU,
    )
    assert train_network(torch.randn(5, 4), BAD).overflow.item() is True
    assert train_network(torch.randn(5, 4), FINE).overflow.item() is False


def test_a_fixed_scale_that_drops_skips_and_stays() -> None:
    network = linear()
    train_network = build(network, weighted, loss_scale_manager=FixedLossScaleManager(16), **ON_CPU)
    before = network.weight.detach().clone()
    assert train_network(torch.randn(5, 4), BAD).overflow.item() is True
    assert torch.equal(network.weight, before)
    assert train_network(torch.randn(5, 4), FINE).loss_scale.item() == 16
    assert not torch.equal(network.weight, before)


def test_without_a_manager_nothing_is_checked() -> None:
    network = linear()
    output = build(network, weighted, loss_scale_manager=None)(torch.randn(5, 4), BAD)
    assert output.overflow.item() is False
    assert output.loss_scale.item() == 1
    assert not torch.isfinite(network.weight).all()


def test_a_parameter_without_gradient_is_no_overflow() -> None:
    network = linear()
    network.unused = nn.Parameter(torch.ones(2))
    network.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    train_network = build(network, loss_scale_manager=DynamicLossScaleManager(16.0), **ON_CPU)
    assert train_network(torch.randn(5, 4), torch.arange(5) % 3).overflow.item() is False
    assert network.unused.tolist() == [1, 1]


def test_the_scale_comes_down_to_where_the_network_trains() -> None:
    train_network = build(level="O2", **ON_CPU)
    outputs = [train_network(torch.randn(5, 4), torch.arange(5) % 3) for _ in range(20)]
    scales = [output.loss_scale.item() for output in outputs]
    assert scales[0] == 2**24
    for output, following in zip(outputs, scales[1:], strict=False):
        assert following == output.loss_scale.item() / (2 if output.overflow else 1)
    assert outputs[0].overflow.item() is True
    assert outputs[-1].overflow.item() is False


def test_the_1001st_overflow_in_a_row_stops_the_run() -> None:
    train_network = build(
        loss_fn=weighted, loss_scale_manager=DynamicLossScaleManager(2.0), **ON_CPU
    )
    x = torch.randn(2, 4)
    for _ in range(3):
        train_network(x, BAD)
    train_network(x, FINE)  # ends the row
    for _ in range(1000):
        train_network(x, BAD)
    assert train_network.loss_scale.value == 1
    with pytest.raises(
        RuntimeError, match="overflow in 1,001 steps in a row, the loss scale is 1:"
    ):
        train_network(x, BAD)


class Thirds(LossScaleManager):
    """A rule of a user's own."""

    def __init__(self) -> None:
        self.scale = 9.0
        self.told: list[bool] = []

    def get_loss_scale(self) -> float:
        return self.scale

    def update_loss_scale(self, overflow: bool) -> None:
        self.told.append(overflow)
        self.scale = self.scale / 3 if overflow else self.scale * 2


class Own(DynamicLossScaleManager):
    """A ready-made manager with another rule."""

    def update_loss_scale(self, overflow: bool) -> None:
        super().update_loss_scale(True)


def test_a_users_own_manager() -> None:
    manager = Thirds()
    with pytest.raises(ValueError, match="on device CPU"):
        build(loss_scale_manager=manager)
    train_network = build(loss_fn=weighted, loss_scale_manager=manager, **ON_CPU)
    labels = [FINE, BAD, BAD, FINE]
    scales = [train_network(torch.randn(5, 4), label).loss_scale.item() for label in labels]
    assert scales == [9, 18, 6, 2]
    assert train_network.loss_scale.value == 4
    assert train_network.record["loss_scale_manager"] == "Thirds"
    assert manager.told == []  # read at build: two networks built with it share nothing
    train_network = build(loss_fn=weighted, loss_scale_manager=Own(64.0), **ON_CPU)
    outputs = [train_network(torch.randn(5, 4), FINE) for _ in range(3)]
    assert [output.loss_scale.item() for output in outputs] == [64, 32, 16]


def test_a_manager_given_twice_is_not_shared() -> None:
    manager = DynamicLossScaleManager(64.0)
    first, second = (
        build(loss_fn=weighted, loss_scale_manager=manager, **ON_CPU) for _ in range(2)
    )
    first(torch.randn(5, 4), BAD)
    assert (first.loss_scale.value, second.loss_scale.value) == (32, 64)
    assert manager.get_loss_scale() == 64


def test_scheduler_is_stepped_after_each_update() -> None:
    network = linear()
    optimizer = sgd(network)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    train_network = build_train_network(
        network, optimizer, nn.CrossEntropyLoss(), level="O1", scheduler=scheduler
    )
    for step in range(3):
        np.testing.assert_allclose(optimizer.param_groups[0]["lr"], 0.1 / (step + 1))
        train_network(torch.randn(5, 4), torch.arange(5) % 3)
