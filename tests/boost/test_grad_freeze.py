"""Laws of gradient freezing: backward ends at the frozen part, and what is frozen does not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ampexp.amp import build_train_network
from ampexp.boost import GradFreeze, freeze_schedule, split_groups
from tests.amp.seen import Operands

NUM_LAYERS = 20


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(NUM_LAYERS)))


def built(network: nn.Module, **kwargs: Any) -> Any:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return build_train_network(
        network,
        optimizer,
        nn.CrossEntropyLoss(),
        boost_level="O1",
        loss_scale_manager=None,
        **kwargs,
    )


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.arange(6) % 4


def frozen_at(boost: GradFreeze, step: int) -> int:
    group = boost.schedule[step]
    return boost.starts[group] if group else 0


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_frozen_parameters_are_bit_equal_after_a_step(level: str) -> None:
    """Neither momentum nor weight decay moves them; all others move."""
    network = deep()
    train_network = built(network, level=level)
    boost = train_network.boosts[0]
    assert isinstance(boost, GradFreeze)
    numbers = set()
    for step in range(12):
        before = [parameter.detach().clone() for parameter in network.parameters()]
        train_network(*batch())
        held = [torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)]
        number = frozen_at(boost, step)
        numbers.add(number)
        assert held == [True] * number + [False] * (len(held) - number)
        gradients = [parameter.grad is None for parameter in network.parameters()]
        assert gradients == held
    assert len(numbers) > 2
    assert 0 in numbers


def test_backward_ends_at_the_frozen_part() -> None:
    """Counted in matrix products: two for a layer that trains, one less for the first of them."""
    network = deep()
    recorded: list[bool] = []
    for layer in network:
        layer.register_forward_hook(lambda *call: recorded.append(call[2].requires_grad))
    train_network = built(network)
    boost = train_network.boosts[0]
    for step in range(12):
        recorded.clear()
        with Operands() as operands:
            train_network(*batch())
        number = frozen_at(boost, step) // 2  # layers: each has a weight and a bias
        assert recorded == [False] * number + [True] * (NUM_LAYERS - number)
        assert sum(name == "mm" for name, _ in operands.calls) == 2 * (NUM_LAYERS - number) - 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_a_user_froze_stays_frozen(when: str) -> None:
    network = deep()
    if when == "before":
        network[0].requires_grad_(False)
    train_network = built(network)
    network[0].requires_grad_(False)
    before = network[0].weight.clone()
    for _ in range(8):
        train_network(*batch())
        flags = [parameter.requires_grad for parameter in network.parameters()]
        assert flags == [False, False] + [True] * (2 * NUM_LAYERS - 2)
    assert torch.equal(network[0].weight, before)


def test_flags_come_back_after_an_error() -> None:
    network = deep()
    train_network = built(network)
    for _ in range(10):
        with pytest.raises(RuntimeError):
            train_network(torch.randn(6, 9), torch.arange(6))
        train_network(*batch())
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_the_random_stream_is_not_touched() -> None:
    """The schedule draws from a generator of its own."""
    import numpy as np

    np.random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].tolist(), torch.get_rng_state()
    built(deep())(*batch())
    torch.manual_seed(5)
    built(nn.Linear(4, 4).requires_grad_())
    assert np.random.get_state()[1].tolist() == before[0]


def test_effect_says_what_is_capped() -> None:
    train_network = built(deep())
    assert "grad_freeze (10 groups)" in train_network.record["boosts"]
    few = built(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    assert "2 groups instead of 10: the network has 2 blocks" in few.record["boosts"]
    one = built(nn.Linear(4, 4))
    assert "nothing is frozen" in one.record["boosts"]
    assert [one(*batch()).loss.isfinite().item() for _ in range(5)] == [True] * 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(({"param_groups": v}, "grad_freeze.param_groups") for v in (0, -1, 2.0, True, "3")),
        *(({"total_steps": v}, "grad_freeze.total_steps") for v in (0, 1.5, False)),
        *(({"freeze_type": v}, "grad_freeze.freeze_type") for v in (2, -1, True, "0", [0])),
        *(
            ({"freeze_p": v}, "grad_freeze.freeze_p")
            for v in (1, 1.0, -0.1, float("nan"), "0.5", True)
        ),
        *(({"seed": v}, "grad_freeze.seed") for v in (-1, 2**32, 1.0, True, None)),
    ],
)
def test_values_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"{words} must be .*; got"):
        GradFreeze(**arguments)


@given(
    st.integers(1, 12), st.sampled_from([0, 1]), st.floats(0, 0.95), st.integers(1, 300), st.integers(0, 2**32 - 1)
)  # fmt: skip
def test_schedule_laws(groups: int, kind: int, freeze_p: float, steps: int, seed: int) -> None:
    schedule = freeze_schedule(groups, kind, freeze_p, steps, seed)
    assert len(schedule) == steps
    assert all(type(index) is int and 0 <= index < groups for index in schedule)
    assert schedule == freeze_schedule(groups, kind, freeze_p, steps, seed)
    if kind == 1:
        assert schedule[0] == 0
        if groups > 1:  # the share of steps that freeze nothing, after each step, to one step
            share = schedule.count(0)
            assert abs(share - freeze_p * steps) <= 1 + 1e-6 * steps
    if groups == 1:
        assert set(schedule) == {0}


names = st.lists(
    st.sampled_from(["a.weight", "a.bias", "bn1.weight", "bn1.bias", "fc.weight", "scale"]),
    max_size=40,
)


@given(names, st.integers(1, 12))
def test_split_groups_laws(names: list[str], groups: int) -> None:
    starts = split_groups(names, groups)
    assert len(starts) <= groups
    assert starts == sorted(set(starts))
    assert (starts[0] == 0) if names else (starts == [])
    for before, start in zip(starts, starts[1:], strict=False):
        assert start - before >= 3
        assert "bn" not in names[start]
        assert "bias" not in names[start]
    if names:
        assert len(split_groups(names, 1000)) >= len(starts)
