"""What every run does, wherever it is kept: the buffer, divergence, and a true status."""

from __future__ import annotations

import logging
import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ampexp.messages import UserError
from ampexp.tracking.signals import Signals, Terminated

log = logging.getLogger(__name__)


class Point(NamedTuple):
    """One finite number of one metric; the timestamp in milliseconds since 1970."""

    key: str
    value: float
    step: int
    timestamp: int


class RecordedRun(ABC):
    """A run that is being recorded; a subclass says how things are kept.

    NaN and inf are never kept as numbers: the first of each metric goes into the tag `diverged`,
    the step of the first of all into the metric `diverged_step`.
    """

    run_id: str | None = None
    where: str

    def __init__(self) -> None:
        """Start with nothing to send."""
        self._signals = Signals()
        self._buffer: list[tuple[int, float, dict[str, float]]] = []
        self._last_step = 0
        self._diverged: dict[str, str] = {}
        self._exists = False  # the store has it; set by `_begin` as soon as that is so

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Remember the values of one step; nothing is sent before `flush`."""
        self._buffer.append((step, time.time(), dict(values)))
        self._last_step = step

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Send final numbers, at the last step that was logged."""
        self.log_metrics(values, self._last_step)
        self.flush()

    def flush(self) -> None:
        """Send what is remembered; a store that fails is reported and asked again next time."""
        try:
            self._drain()
        except UserError as trouble:
            log.warning("metrics are kept and sent later: %s", trouble)

    @abstractmethod
    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set words that describe the run."""

    @abstractmethod
    def log_text(self, text: str, name: str) -> None:
        """Keep a text as the artifact `name`."""

    @abstractmethod
    def _begin(self, config: Mapping[str, Any], config_yaml: str, tags: Mapping[str, str]) -> None:
        """Make the run where it is kept."""

    @abstractmethod
    def _send(self, points: list[Point]) -> None:
        """Keep these points."""

    @abstractmethod
    def _end(self, status: str) -> None:
        """Close the run with this status."""

    def _drain(self) -> None:
        taken = len(self._buffer)
        points, diverged = [], {}
        for step, seconds, values in self._buffer[:taken]:
            for key, value in values.items():
                point = Point(key, float(value), step, int(seconds * 1000))
                if math.isfinite(point.value):
                    points.append(point)
                elif key not in self._diverged and key not in diverged:
                    diverged[key] = point
        if diverged and not self._diverged:
            first = min(diverged.values(), key=lambda point: point.step)
            points.append(Point("diverged_step", first.step, first.step, first.timestamp))
        self._send(points)
        if diverged:
            said = {key: f"{key} is {p.value} at step {p.step}" for key, p in diverged.items()}
            self.set_tags({"diverged": "; ".join([*self._diverged.values(), *said.values()])})
            self._diverged.update(said)
        # last: after a failure above all of it is sent again, and the store knows what it has
        del self._buffer[:taken]

    @contextmanager
    def recorded(
        self, config: Mapping[str, Any], config_yaml: str, tags: Mapping[str, str]
    ) -> Iterator[Any]:
        """Record the block: its status is true however it ends, and all metrics are sent.

        FINISHED; FAILED on an exception or a non-zero SystemExit; KILLED on KeyboardInterrupt and
        on SIGTERM, which is raised as `Terminated` in the main thread. Exceptions pass on.
        """
        status, error = "FINISHED", None
        with self._signals:
            try:
                with self._signals.hold():  # a run that exists is a run that gets a status
                    self._begin(config, config_yaml, tags)
                yield self
            except BaseException as raised:
                status, error = status_of(raised), raised
                raise
            finally:
                with self._signals.hold():
                    self._finish(status, error)

    def _finish(self, status: str, error: BaseException | None) -> None:
        if not self._exists:
            return
        trouble = None
        if status == "FAILED" and error is not None:
            trouble = self._attempt(self._explain, error)
        trouble = self._attempt(self._drain) or trouble
        if status == "FINISHED" and (trouble or self._signals.waiting is not None):
            status = "KILLED" if trouble is None else "FAILED"
        trouble = self._attempt(self._end, status) or trouble
        if trouble is not None:
            if error is None:
                raise trouble
            log.warning("the record of this run is incomplete: %s", trouble)

    def _attempt(self, act: Any, *arguments: Any) -> Exception | None:
        try:
            act(*arguments)
        except Exception as trouble:
            return trouble
        return None

    def _explain(self, error: BaseException) -> None:
        said = str(error).strip() or (repr(error.code) if isinstance(error, SystemExit) else "")
        line = " ".join(f"{type(error).__name__}: {said}".split())
        self.set_tags({"error": line[:500]})
        self.log_text("".join(traceback.format_exception(error)), "traceback.txt")


def status_of(error: BaseException) -> str:
    """Say how a run ended that this exception left."""
    if isinstance(error, KeyboardInterrupt | Terminated):
        return "KILLED"
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return "FINISHED"
    return "FAILED"
