"""Where a run is written down: MLflow, or plain memory, behind one small protocol."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ampexp.messages import UserError, refusal
from ampexp.tracking.signals import Terminated

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TRACKERS", "Run", "Terminated", "Tracker", "open_tracker"]

TRACKERS = ("mlflow", "none")


class Run(Protocol):
    """One training run as it is being recorded."""

    run_id: str | None
    where: str

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Remember the values of one step; nothing is sent before `flush`."""

    def flush(self) -> None:
        """Send what is remembered; a store that fails is reported and asked again next time."""

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Send final numbers, at the last step that was logged."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set words that describe the run."""

    def log_text(self, text: str, name: str) -> None:
        """Keep a text as the artifact `name`."""

    def log_model(self, network: nn.Module, example: Any) -> None:
        """Keep the trained network; `example` is a batch of what its forward takes."""


class Tracker(Protocol):
    """A store of runs."""

    where: str

    def run(
        self, config: Mapping[str, Any], config_yaml: str, tags: Mapping[str, str]
    ) -> AbstractContextManager[Run]:
        """Record one run: FINISHED, FAILED or KILLED as the block ends."""


def open_tracker(
    name: str, uri: str | None, experiment: str, run_name: str | None, launch_directory: Path
) -> Tracker:
    """Open the tracker `name`, creating store and experiment where they do not exist yet.

    `uri` is where MLflow writes; None means the environment variable MLFLOW_TRACKING_URI, else
    `mlflow.db` in `launch_directory`, with artifacts in `mlruns` beside it. A relative SQLite path
    is one from `launch_directory`.

    Raises:
        UserError: unknown `name`; a store that is malformed, refused, or does not answer.
    """
    if name == "none":
        from ampexp.tracking.memory import MemoryTracker

        return MemoryTracker()
    if name != "mlflow":
        raise UserError(refusal("tracker.name", TRACKERS, name))
    from ampexp.tracking.mlflow_tracker import MlflowTracker

    return MlflowTracker(uri, experiment, run_name, launch_directory)
