"""Laws of the cast: where writes land, that no cast outlives its forward, and what cannot be cast."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampexp.amp import auto_mixed_precision
from tests.amp.low import LOW_LEVELS, WIDE, built, rounded


class Writes(nn.Module):
    """Write to views of buffers and parameters, in place and by out=, inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("table", torch.full((3, 4), 0.1))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("product", torch.zeros(2, 3))
        self.plain = nn.Parameter(torch.full((2, 2), 0.1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.table[1].copy_(x[0])
            self.table.view(-1)[8:].fill_(2.0)
            self.table.t()[0, 0] = 5.0
            self.total += x[0]
            torch.mm(x[:2], self.head.weight.t(), out=self.product)
            self.plain.data[0].mul_(2)
            self.plain.select(1, 1).zero_()
        return self.head(x)


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_writes_to_views_land_in_the_originals(level: str) -> None:
    network = Writes()
    homes = {name: value.data_ptr() for name, value in network.state_dict().items()}
    x = torch.randn(5, 4)
    auto_mixed_precision(network, level)(x)
    low = level in ("O2", "O3")
    first = rounded(x[0]) if low else x[0]
    assert torch.equal(network.table[1], first)
    assert network.table[2].tolist() == [2.0] * 4
    assert network.table[0, 0].item() == 5.0
    assert torch.equal(network.table[0, 1:], torch.full((3,), 0.1))  # not written: not rounded
    assert torch.equal(network.total, first)
    torch.testing.assert_close(
        network.product, x[:2] @ network.head.weight.t(), rtol=1e-2, atol=1e-2
    )
    assert network.plain[:, 1].tolist() == [0, 0]
    assert network.plain[0, 0].item() == pytest.approx(0.2, abs=1e-4)
    assert network.plain[1, 0].item() == torch.tensor(0.1).item()
    assert {name: value.data_ptr() for name, value in network.state_dict().items()} == homes
    assert {value.dtype for value in network.state_dict().values()} == {WIDE}


class Aliases(nn.Module):
    def forward(self, x: Tensor, out: Tensor) -> tuple[bool, ...]:
        work = x * 1.0
        view = work[0]
        result = work.relu_()
        sums = torch.add(work, 1.0, out=out)
        matrix = torch.zeros(2, 3)
        product = torch.mm(work, work.new_zeros(4, 3), out=matrix)
        added = work.addmm_(work, torch.eye(4))
        return (
            result is work,
            sums is out,
            product is matrix,
            added is work,
            bool(torch.equal(view, work[0])),
        )


@pytest.mark.parametrize("level", ["O0", *LOW_LEVELS])
def test_in_place_and_out_keep_their_aliasing(level: str) -> None:
    out = torch.zeros(2, 4)
    network = nn.ModuleDict({"a": Aliases(), "b": nn.Linear(1, 1)})
    network.forward = network["a"].forward
    assert auto_mixed_precision(network, level)(torch.randn(2, 4), out=out) == (True,) * 5


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_weights_changed_in_place_between_forwards_are_seen(level: str) -> None:
    network, x = nn.Linear(4, 3), torch.randn(2, 4)
    cast = auto_mixed_precision(network, level)
    with torch.no_grad():
        cast(x)
        network.weight.mul_(2.0)
        network.bias.data = torch.ones(3)
        other = nn.Linear(4, 3)
        other.load_state_dict(network.state_dict())
        assert torch.equal(cast(x), auto_mixed_precision(other, level)(x))
    cast(x).sum().backward()
    assert network.weight.grad is not None


class ChangesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            self.first.weight.mul_(2.0)
        with torch.no_grad():
            z = self.first(x)
        return torch.stack([y.detach(), z])


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_weights_changed_inside_one_forward_are_seen(level: str) -> None:
    network = ChangesItself()
    network.first.bias.data.zero_()
    y, z = auto_mixed_precision(network, level)(torch.randn(2, 4))
    torch.testing.assert_close(z, y * 2, rtol=2e-3, atol=2e-3)


class InnerAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(x)


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_autocast_around_or_inside_changes_nothing(level: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    results = []
    for network in (nn.Linear(4, 3), nn.Linear(4, 3), InnerAutocast()):
        inner = network.head if isinstance(network, InnerAutocast) else network
        inner.load_state_dict(
            {"weight": torch.linspace(-1, 1, 12).view(3, 4), "bias": torch.ones(3)}
        )
        train_network = built(network, level)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=len(results) == 1):
            losses = [train_network(x, y).loss.item() for _ in range(2)]
        results.append((losses, inner.weight.detach().clone()))
    for losses, weight in results[1:]:
        assert losses == results[0][0]
        assert torch.equal(weight, results[0][1])


@pytest.mark.parametrize("level", LOW_LEVELS)
def test_other_threads_keep_pytorchs_behaviour(level: str) -> None:
    """A thread that works while a step is inside the network sees no cast."""
    found: list[Any] = []

    class Spawns(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            def work() -> None:
                ones = torch.ones(2, 4, dtype=WIDE) / 3
                found.append(
                    (ones.relu().equal(ones), ones.dtype, F.linear(ones, torch.eye(4)).equal(ones))
                )

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return super().forward(x)

    built(Spawns(4, 3), level)(torch.randn(5, 4), torch.arange(5) % 3)
    assert found == [(True, WIDE, True)]


def test_an_error_inside_forward_leaves_nothing_active() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    network = nn.Sequential(nn.LayerNorm(4), Fails(4, 3))
    with pytest.raises(KeyError, match="mine"):
        built(network, "O2")(torch.randn(5, 4), torch.arange(5) % 3)
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not network[0]._forward_hooks
    assert not network[0]._forward_pre_hooks
    third = torch.tensor([1 / 3])
    assert torch.equal(third.relu(), third)


def opaque(kind: str) -> nn.Module:
    inner = nn.Linear(4, 3)
    if kind == "script":
        return torch.jit.trace(inner, torch.ones(1, 4))
    if kind == "compile":
        return torch.compile(inner)
    return torch.export.export(inner, (torch.ones(1, 4),)).module()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["script", "compile", "export"])
def test_opaque_parts_are_refused_at_build(kind: str) -> None:
    network = nn.Sequential(nn.Identity(), nn.ModuleDict({"deep": opaque(kind)})["deep"])
    for level in LOW_LEVELS:
        with pytest.raises(ValueError, match=r"^network\.1 \(.*operators cannot be seen"):
            built(network, level)
    built(network, "O0")
