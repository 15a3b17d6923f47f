"""Loss scaling by hand, for a training loop of your own.

Source: `mindspore.amp` (scalers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampexp.amp.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    checked_count,
    checked_number,
)
from ampexp.messages import refusal


class LossScaler(ABC):
    """Scale a loss and unscale gradients by hand, in a training loop of your own.

    Source: `mindspore.amp.LossScaler`.
    """

    _scale: LossScale

    @property
    def scale_value(self) -> float:
        """The current scale."""
        return self._scale.value

    def scale(self, inputs: Any) -> Any:
        """Multiply a tensor, or a tuple, list or dict of them, by the scale."""
        return _multiplied(inputs, self._scale.value)

    def unscale(self, inputs: Any) -> Any:
        """Divide by the scale, in float32 at least."""
        return _multiplied(inputs, 1.0 / self._scale.value, widen=True)

    @abstractmethod
    def adjust(self, grads_finite: bool | Tensor) -> bool:
        """Move on by one step; True when the scale may have changed."""


class StaticLossScaler(LossScaler):
    """Scale by a constant `scale_value` above 0.

    Source: `mindspore.amp.StaticLossScaler`.
    """

    def __init__(self, scale_value: float) -> None:
        """Check and keep the scale."""
        self._scale = FixedLossScale(checked_number("scale_value", scale_value, 0.0, above=True))

    def adjust(self, grads_finite: bool | Tensor) -> bool:
        """Do nothing: the scale is constant."""
        return False


class DynamicLossScaler(LossScaler):
    """Scale dynamically, as `DynamicLossScaleManager` does.

    Source: `mindspore.amp.DynamicLossScaler`.
    """

    def __init__(self, scale_value: float, scale_factor: float, scale_window: int) -> None:
        """Check and keep the arguments."""
        self._scale = DynamicLossScale(
            checked_number("scale_value", scale_value, 1.0),
            checked_number("scale_factor", scale_factor, 1.0, above=True),
            checked_count("scale_window", scale_window),
        )

    def adjust(self, grads_finite: bool | Tensor) -> bool:
        """Move on by one step whose gradients were all finite or not."""
        self._scale = self._scale.adjust(bool(grads_finite))
        return True


def all_finite(inputs: Tensor | Iterable[Tensor]) -> Tensor:
    """Say whether all numbers of some tensors are finite: a boolean scalar on their device, without a synchronisation.

    Sparse tensors count by their values. No tensor at all is finite.

    Source: `mindspore.amp.all_finite`.

    >>> all_finite([torch.ones(2), torch.tensor(float("inf"))])
    tensor(False)
    """
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    values = [value for value in values if value.is_floating_point() or value.is_complex()]
    if not values:
        return torch.tensor(True, device=tensors[0].device if tensors else None)
    return torch.stack([value.isfinite().all() for value in values]).all()


def _multiplied(value: Any, factor: float, *, widen: bool = False) -> Any:
    if isinstance(value, Tensor):
        wide = value.float() if widen and value.dtype in (torch.float16, torch.bfloat16) else value
        return wide * factor
    if isinstance(value, dict):
        return {key: _multiplied(item, factor, widen=widen) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_multiplied(item, factor, widen=widen) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    raise TypeError(refusal("inputs", "a tensor, or a tuple, list or dict of tensors", value))
