"""A tracker that keeps everything in plain dicts: for `tracker=none` and for tests."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ampexp.tracking.keys import flatten
from ampexp.tracking.recording import Point, RecordedRun

if TYPE_CHECKING:
    from torch import nn


class MemoryTracker:
    """Runs as objects, in the order of their start."""

    where = "not logged"

    def __init__(self) -> None:
        """Start without runs."""
        self.runs: list[MemoryRun] = []

    def run(
        self, config: Mapping[str, Any], config_yaml: str, tags: Mapping[str, str]
    ) -> AbstractContextManager[MemoryRun]:
        """Record one run and keep it in `runs`."""
        self.runs.append(MemoryRun())
        return self.runs[-1].recorded(config, config_yaml, tags)


class MemoryRun(RecordedRun):
    """One run: `params`, `metrics` (key to points), `summary`, `tags`, `texts`, `model`, `status`."""

    where = MemoryTracker.where

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.params: dict[str, Any] = {}
        self.metrics: dict[str, list[Point]] = {}
        self.summary: dict[str, float] = {}
        self.tags: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.model: nn.Module | None = None
        self.status = "RUNNING"

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Keep final numbers, as metrics and in `summary`."""
        self.summary.update({key: v for key, v in values.items() if math.isfinite(v)})
        super().log_summary(values)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set words that describe the run."""
        self.tags.update(tags)

    def log_text(self, text: str, name: str) -> None:
        """Keep a text under its name."""
        self.texts[name] = text

    def log_model(self, network: nn.Module, example: Any) -> None:
        """Keep a copy of the network."""
        self.model = copy.deepcopy(network)

    def _begin(self, config: Mapping[str, Any], config_yaml: str, tags: Mapping[str, str]) -> None:
        self._exists = True
        self.params = flatten(config)
        self.texts["config.yaml"] = config_yaml
        self.tags.update(tags)

    def _send(self, points: list[Point]) -> None:
        for point in points:
            self.metrics.setdefault(point.key, []).append(point)

    def _end(self, status: str) -> None:
        self.status = status
