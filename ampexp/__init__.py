"""Which precision level and which boost level to train with: how much faster, how much smaller, at what accuracy.

>>> import ampexp
>>> config = ampexp.compose("level=O2", "boost_level=O1")
>>> config.level, config.boost_level
('O2', 'O1')
"""

from __future__ import annotations

import importlib
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ampexp.config import AmpConfig
    from ampexp.job import RunSummary

__version__ = "0.1.0"

_ROOMS = ("amp", "boost", "data", "networks")
_NAMES = {
    "AmpConfig": "ampexp.config", "ConfigError": "ampexp.config", "UserError": "ampexp.messages",
}  # fmt: skip

__all__ = ["AmpConfig", "ConfigError", "UserError", "amp", "boost", "compose", "data", "networks", "run"]  # noqa: F822


def compose(*overrides: str, config_dir: str | PathLike[str] | None = None) -> AmpConfig:
    """Compose and check a config from the words of the command line.

    `config_dir` is a directory with options of one's own, as `--config-dir`. Raises ConfigError with all faults.
    """
    from ampexp.composition import compose

    return compose(*overrides, config_dir=config_dir)


def run(config: AmpConfig) -> RunSummary:
    """Run the job that a config describes: train, measure, log; give its summary."""
    from ampexp.job import run

    return run(config)


def __getattr__(name: str) -> Any:
    """Import a room or a name when it is asked for: `import ampexp` alone imports no torch, MLflow or Hydra."""
    if name in _ROOMS:
        return importlib.import_module(f"ampexp.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'ampexp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
