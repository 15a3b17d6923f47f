"""Loss scaling: values that adjust themselves, and MindSpore's managers around them.

A loss scale is a value: `adjust(finite)` gives the next one. "No scaling" is a value of the same kind.

Source: `mindspore.amp` (managers); Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ampexp.messages import refusal

FLOAT32_MAX = torch.finfo(torch.float32).max


def checked_number(where: str, value: object, least: float, *, above: bool = False) -> float:
    """Check a finite real number: of wrong kind TypeError, out of range ValueError."""
    allowed = (
        f"a finite number {'above' if above else 'of at least'} {least:g} that float32 can hold"
    )
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(refusal(where, allowed, value))
    if not abs(value) <= FLOAT32_MAX or value < least or (above and value == least):
        raise ValueError(refusal(where, allowed, value))
    return float(value)


def checked_count(where: str, value: object) -> int:
    """Check a positive integer: of wrong kind TypeError, out of range ValueError."""
    allowed = "an integer of at least 1"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(refusal(where, allowed, value))
    if value < 1:
        raise ValueError(refusal(where, allowed, value))
    return value


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(refusal(where, "True or False", value))
    return value


class LossScale(ABC):
    """A factor on the loss and what becomes of it after a step.

    `checks`: gradients are checked for overflow; `skips`: a step that overflowed is not applied.
    """

    value: float
    checks: bool = True
    skips: bool = True

    @abstractmethod
    def adjust(self, finite: bool) -> LossScale:
        """Give the scale of the next step; `finite`: no gradient of this one overflowed."""


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """No scaling: nothing is multiplied and nothing is checked."""

    value: float = 1.0
    checks = False
    skips = False

    def adjust(self, finite: bool) -> NoLossScale:
        """Stay as it is."""
        return self

    def __str__(self) -> str:
        """Name it as the configuration does."""
        return "none"


@dataclass(frozen=True)
class FixedLossScale(LossScale):
    """A constant factor; a step that overflowed is skipped or, with `skips=False`, applied all the same."""

    value: float
    skips: bool = True

    def adjust(self, finite: bool) -> FixedLossScale:
        """Stay as it is."""
        return self

    def __str__(self) -> str:
        """Name it as the configuration does, with its value."""
        return f"fixed {self.value:g}"


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Divide by the factor on overflow, multiply after `scale_window` finite steps in a row.

    Never below 1, never past what float32 holds.

    >>> scale = DynamicLossScale(8.0, scale_window=2)
    >>> [(scale := scale.adjust(finite)).value for finite in (True, True, False, False)]
    [8.0, 16.0, 8.0, 4.0]
    """

    value: float
    scale_factor: float = 2.0
    scale_window: int = 2000
    num_finite_steps: int = 0

    def adjust(self, finite: bool) -> DynamicLossScale:
        """Give the scale of the next step."""
        if not finite:
            return replace(self, value=max(self.value / self.scale_factor, 1.0), num_finite_steps=0)
        if self.num_finite_steps + 1 < self.scale_window:
            return replace(self, num_finite_steps=self.num_finite_steps + 1)
        grown = self.value * self.scale_factor
        return replace(
            self, value=grown if grown <= FLOAT32_MAX else self.value, num_finite_steps=0
        )

    def __str__(self) -> str:
        """Name it as the configuration does, with its start."""
        return f"dynamic {self.value:g}"


@dataclass(frozen=True)
class ManagedLossScale(LossScale):
    """The scale that a user's own `LossScaleManager` keeps."""

    manager: LossScaleManager
    value: float

    def adjust(self, finite: bool) -> ManagedLossScale:
        """Tell the manager and ask it."""
        self.manager.update_loss_scale(not finite)
        return replace(
            self,
            value=checked_number(
                "get_loss_scale()", self.manager.get_loss_scale(), 0.0, above=True
            ),
        )

    def __str__(self) -> str:
        """Name the manager's class."""
        return type(self.manager).__name__


class LossScaleManager(ABC):
    """What scales the loss of a train network; subclass it to bring a rule of your own.

    Source: `mindspore.amp.LossScaleManager`. A manager given to `build_train_network` is read at build: the train
    network keeps its own state, and a subclass of your own is copied.
    """

    @abstractmethod
    def get_loss_scale(self) -> float:
        """Give the current scale."""

    @abstractmethod
    def update_loss_scale(self, overflow: bool) -> None:
        """Move on by one step that overflowed or not."""

    def get_update_cell(self) -> Callable[..., Any] | None:
        """Give a function of (loss_scale, overflow) that gives the next scale, or None when the scale is constant."""
        return None

    def loss_scale(self) -> LossScale:
        """Give the value that a train network starts from."""
        manager = copy.deepcopy(self)
        return ManagedLossScale(
            manager, checked_number("get_loss_scale()", manager.get_loss_scale(), 0.0, above=True)
        )


class FixedLossScaleManager(LossScaleManager):
    """Scale by a constant.

    Args:
        loss_scale: the factor, at least 1.
        drop_overflow_update: whether a step that overflowed is skipped. With False its update is applied all the same.

    Raises:
        TypeError: an argument of wrong kind.
        ValueError: a scale below 1, NaN or infinite.

    Source: `mindspore.amp.FixedLossScaleManager`. There, the optimizer divides by the scale when nothing is dropped;
    here the train network always does.

    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True) -> None:
        """Check and keep the arguments."""
        self._scale = FixedLossScale(
            checked_number("loss_scale", loss_scale, 1.0),
            _flag("drop_overflow_update", drop_overflow_update),
        )

    def get_loss_scale(self) -> float:
        """Give the constant."""
        return self._scale.value

    def get_drop_overflow_update(self) -> bool:
        """Say whether a step that overflowed is skipped."""
        return self._scale.skips

    def update_loss_scale(self, overflow: bool) -> None:
        """Do nothing: the scale is constant."""

    def loss_scale(self) -> LossScale:
        """Give the value that a train network starts from."""
        return (
            self._scale
            if _rule(type(self)) == _rule(FixedLossScaleManager)
            else super().loss_scale()
        )


class DynamicLossScaleManager(LossScaleManager):
    """Scale dynamically: down on overflow, up after a window of finite steps.

    Args:
        init_loss_scale: the first scale, at least 1.
        scale_factor: what it is divided and multiplied by, above 1.
        scale_window: finite steps in a row before it grows.

    Raises:
        TypeError: an argument of wrong kind.
        ValueError: an argument out of range, NaN or infinite.

    Source: `mindspore.amp.DynamicLossScaleManager`.

    """

    def __init__(
        self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000
    ) -> None:
        """Check and keep the arguments."""
        self._scale = DynamicLossScale(
            checked_number("init_loss_scale", init_loss_scale, 1.0),
            checked_number("scale_factor", scale_factor, 1.0, above=True),
            checked_count("scale_window", scale_window),
        )

    def get_loss_scale(self) -> float:
        """Give the current scale."""
        return self._scale.value

    def update_loss_scale(self, overflow: bool) -> None:
        """Move on by one step that overflowed or not."""
        self._scale = self._scale.adjust(not overflow)

    def get_update_cell(self) -> Callable[[float, bool], float]:
        """Give a function of (loss_scale, overflow) that keeps its own window and gives the next scale."""
        state = self._scale

        def update(loss_scale: float, overflow: bool) -> float:
            nonlocal state
            state = replace(state, value=float(loss_scale)).adjust(not overflow)
            return state.value

        return update

    def loss_scale(self) -> LossScale:
        """Give the value that a train network starts from."""
        return (
            self._scale
            if _rule(type(self)) == _rule(DynamicLossScaleManager)
            else super().loss_scale()
        )


def _rule(kind: type[LossScaleManager]) -> tuple[object, object]:
    """Give what makes a manager's rule: a subclass that changes it is asked, not read."""
    return kind.get_loss_scale, kind.update_loss_scale
