"""The namespace `mindspore.amp` on PyTorch."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "build_train_network": "build",
    "TrainNetwork": "step",
    "StepOutput": "step",
    "auto_mixed_precision": "network",
    "custom_mixed_precision": "network",
    "PrecisionNetwork": "network",
    "PrecisionError": "cast",
    "get_white_list": "policy",
    "get_black_list": "policy",
    "LossScaleManager": "loss_scale",
    "FixedLossScaleManager": "loss_scale",
    "DynamicLossScaleManager": "loss_scale",
    "LossScaler": "scalers",
    "StaticLossScaler": "scalers",
    "DynamicLossScaler": "scalers",
    "all_finite": "scalers",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for, so that the tables of words do not bring torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
