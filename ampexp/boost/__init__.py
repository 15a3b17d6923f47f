"""Methods that make training faster, one file each."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Boost": "base",
    "GradFreeze": "grad_freeze",
    "GradCentralization": "grad_centralization",
    "centralize": "grad_centralization",
    "freeze_schedule": "grad_freeze",
    "split_groups": "grad_freeze",
    "BOOST_LEVELS": "levels",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is asked for, so that the tables of words do not bring torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def make_boosts(boost_level: str, **arguments: dict[str, Any]) -> list[Any]:
    """Make the boosts of a level, each with its arguments (by its name), outermost first."""
    from ampexp.boost.grad_centralization import GradCentralization
    from ampexp.boost.grad_freeze import GradFreeze
    from ampexp.boost.levels import BOOST_LEVELS

    classes = {"grad_freeze": GradFreeze, "grad_centralization": GradCentralization}
    return [classes[name](**arguments.get(name, {})) for name in BOOST_LEVELS[boost_level]]
