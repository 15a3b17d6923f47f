"""Gradient freezing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import nn

from ampexp.boost.base import Boost, trainable
from ampexp.messages import refusal


def freeze_schedule(
    num_groups: int, freeze_type: int, freeze_p: float, total_steps: int, seed: int
) -> list[int]:
    """Give for each step the number of groups, from the input on, that compute no gradient.

    Args:
        num_groups: groups of parameters.
        freeze_type: 0: stretches, as 0 0 0 1 2 3; 1: single steps in between, as 0 2 0 0 5 0.
        freeze_p: the share of steps that freeze nothing, in [0, 1).
        total_steps: length of the schedule.
        seed: of NumPy's legacy generator.

    Source: `generate_freeze_index_sequence` of MindSpore's `boost`; the draws are the same for the same seed.

    >>> freeze_schedule(4, 0, 0.5, 7, seed=0)
    [0, 0, 0, 1, 2, 3, 0]
    """
    if num_groups <= 1:
        return [0] * total_steps
    if freeze_type == 0:
        num_zeros = int(freeze_p * (num_groups - 1) // (1 - freeze_p) + 0.5)
        period = [0] * num_zeros + list(range(1, num_groups))
        return list(itertools.islice(itertools.cycle(period), total_steps))
    generator = np.random.RandomState(seed)
    indices = np.arange(1, num_groups)
    chances = indices / indices.sum()
    schedule, num_frozen = [0], 0
    while len(schedule) < total_steps:
        if num_frozen / len(schedule) < 1 - freeze_p:
            schedule.append(int(generator.choice(indices[::-1], p=chances)))
            num_frozen += 1
        else:
            schedule.append(0)
    return schedule[:total_steps]


def split_groups(names: list[str], param_groups: int) -> list[int]:
    """Give for each group the position of its first parameter; group i trains everything from there on.

    A name with `bn` or `bias` stays with its predecessor; a new block may start once three tensors are held. With fewer
    blocks than groups asked for there are as many groups as blocks.

    Source: `split_parameters_groups` of MindSpore's `boost`, which silently freezes nothing in that case.

    >>> split_groups(["a.weight", "a.bias", "b.weight", "b.bias", "c.weight"], 2)
    [0, 4]
    """
    blocks, held = [0] if names else [], 0
    for position, name in enumerate(names):
        if held >= 3 and "bn" not in name and "bias" not in name:
            blocks.append(position)
            held = 0
        held += 1
    num_groups = min(param_groups, len(blocks))
    stride = len(blocks) // num_groups if num_groups else 0
    return [blocks[group * stride] for group in range(num_groups)]


class GradFreeze(Boost):
    """Compute no gradient for the first k groups of parameters in a step, k by a schedule.

    Backward ends at the frozen part; frozen parameters have no gradient, so neither momentum nor weight decay moves
    them.

    Args:
        param_groups: groups asked for, at least 1.
        freeze_type: 0 or 1, see `freeze_schedule`.
        freeze_p: the share of steps that freeze nothing, in [0, 1).
        total_steps: length of the schedule; after it, it starts again.
        seed: of the schedule's own generator.

    Raises:
        ValueError: a value out of range.

    Source: `GradientFreeze` of MindSpore's `boost`.

    """

    def __init__(
        self,
        param_groups: int = 10,
        freeze_type: int = 1,
        freeze_p: float = 0.7,
        total_steps: int = 65536,
        seed: int = 123,
    ) -> None:
        """Check and keep the arguments."""
        for where, value in (("param_groups", param_groups), ("total_steps", total_steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(refusal(f"grad_freeze.{where}", "an integer of at least 1", value))
        if isinstance(freeze_type, bool) or freeze_type not in (0, 1):
            raise ValueError(refusal("grad_freeze.freeze_type", "0 or 1", freeze_type))
        if (
            isinstance(freeze_p, bool)
            or not isinstance(freeze_p, int | float)
            or not 0 <= freeze_p < 1
        ):
            raise ValueError(refusal("grad_freeze.freeze_p", "a number in [0, 1)", freeze_p))
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(refusal("grad_freeze.seed", "an integer in [0, 2**32)", seed))
        self.param_groups = param_groups
        self.arguments = (freeze_type, float(freeze_p), total_steps, seed)
        self.parameters: list[nn.Parameter] = []
        self.starts: list[int] = []
        self.schedule: list[int] = [0]

    def rewrite(self, network: nn.Module) -> None:
        """Group the parameters that train and draw the schedule."""
        named = list(trainable(network))
        self.parameters = [parameter for _, parameter in named]
        self.starts = split_groups([name for name, _ in named], self.param_groups)
        self.schedule = freeze_schedule(len(self.starts), *self.arguments)
        self.effect = f"{len(self.starts)} groups"
        if len(self.starts) < self.param_groups:
            self.effect += (
                f" instead of {self.param_groups}: the network has {len(self.starts)} blocks"
            )
        if len(self.starts) < 2:
            self.effect += "; nothing is frozen"

    @contextmanager
    def select(self, step: int) -> Iterator[None]:
        """Freeze the groups of this step."""
        group = self.schedule[step % len(self.schedule)]
        first = self.parameters[: self.starts[group] if group else 0]
        frozen = [parameter for parameter in first if parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
