"""Learning-rate schedules: what the optimizer's learning rate is multiplied by at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ampexp.messages import UserError, refusal


@dataclass(frozen=True)
class Constant:
    """Rise linearly from 1/warmup_steps to 1 in the first warmup_steps steps, then stay there.

    Calling it with the number of steps already taken gives the factor of the next one. A run shorter than the warm-up
    ends within it. Raises UserError for values outside their range.
    """

    total_steps: int
    warmup_steps: int

    def __post_init__(self) -> None:
        self.check("total_steps", "an integer of at least 1", self.total_steps >= 1)
        self.check("warmup_steps", "an integer of at least 0", self.warmup_steps >= 0)

    def check(self, name: str, allowed: str, holds: bool) -> None:
        """Refuse the value of the field `name` unless the condition holds."""
        if not holds:
            raise UserError(refusal(f"scheduler.{name}", allowed, getattr(self, name)))

    def __call__(self, step: int) -> float:
        """Give the factor of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        span = max(1, self.total_steps - self.warmup_steps)
        return self.decay(min(step - self.warmup_steps, span), span)

    def decay(self, done: int, span: int) -> float:
        """Give the factor after `done` of the `span` steps that follow the warm-up."""
        return 1.0


@dataclass(frozen=True)
class Cosine(Constant):
    """Fall along half a cosine from 1 to final_fraction after the warm-up."""

    final_fraction: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("final_fraction", "a number from 0 to 1", 0 <= self.final_fraction <= 1)

    def decay(self, done: int, span: int) -> float:
        """Give final + (1 - final) (1 + cos(pi done / span)) / 2."""
        return (
            self.final_fraction
            + (1 - self.final_fraction) * (1 + math.cos(math.pi * done / span)) / 2
        )


@dataclass(frozen=True)
class Step(Constant):
    """Multiply by gamma num_drops times, at equal distances after the warm-up."""

    num_drops: int
    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("num_drops", "an integer of at least 0", self.num_drops >= 0)
        self.check("gamma", "a number above 0 and at most 1", 0 < self.gamma <= 1)

    def decay(self, done: int, span: int) -> float:
        """Give gamma to the power of the drops behind us."""
        return self.gamma ** min(self.num_drops, done * (self.num_drops + 1) // span)


def constant(optimizer: Optimizer, total_steps: int, warmup_steps: int = 0) -> LambdaLR:
    """Keep the learning rate after a linear warm-up."""
    return LambdaLR(optimizer, Constant(total_steps, warmup_steps))


def cosine(
    optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> LambdaLR:
    """Let the learning rate fall along half a cosine to final_fraction of itself after a linear warm-up."""
    return LambdaLR(optimizer, Cosine(total_steps, warmup_steps, final_fraction))


def step(
    optimizer: Optimizer,
    total_steps: int,
    warmup_steps: int = 0,
    num_drops: int = 2,
    gamma: float = 0.1,
) -> LambdaLR:
    """Multiply the learning rate by gamma num_drops times at equal distances after a linear warm-up."""
    return LambdaLR(optimizer, Step(total_steps, warmup_steps, num_drops, gamma))
