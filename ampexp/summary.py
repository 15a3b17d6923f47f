"""From the records of a run to plain numbers with units."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ampexp.memory import process_peak_bytes

if TYPE_CHECKING:
    from ampexp.trainer import Clock, StepRecord


@dataclass(frozen=True)
class RunSummary:
    """What a run did: words (`record`), results on the test set and measurements.

    `samples_per_second` is the samples of the timed steps over the sum of their seconds, None when the run was not
    longer than its warm-up. A step is timed when it lies behind the warm-up and was applied; skipped steps and their
    samples are counted apart. `peak_tensor_bytes` is what the tensors of a step take, `process_peak_bytes` the process.
    """

    record: dict[str, str]
    test: dict[str, float]
    held: dict[str, float]
    num_steps: int
    num_epochs: int
    num_samples: int
    num_timed_steps: int
    samples_per_second: float | None
    step_seconds_median: float | None
    step_seconds_p95: float | None
    data_seconds: float
    compute_seconds: float
    num_overflows: int
    num_skipped_steps: int
    num_skipped_samples: int
    final_loss_scale: float
    peak_tensor_bytes: int
    process_peak_bytes: int
    where: str = ""
    run_id: str | None = None

    def metrics(self) -> dict[str, float]:
        """Give the numbers, the test set's under `test_`, the held part's last under `held_`."""
        numbers = {key: value for key, value in asdict(self).items() if isinstance(value, int | float)}
        return {
            **numbers,
            **{f"test_{key}": value for key, value in self.test.items()},
        }


@dataclass
class Measurements:
    """What is gathered while a run goes on; reading the device waits for the end of a window."""

    clock: Clock
    num_steps: int = 0
    num_samples: int = 0
    num_overflows: int = 0
    num_skipped_steps: int = 0
    num_skipped_samples: int = 0
    num_timed_samples: int = 0
    data_seconds: float = 0.0
    loss_scale: float = 1.0
    step_seconds: list[float] = field(default_factory=list)
    untimed_seconds: float = 0.0
    _window: list[StepRecord] = field(default_factory=list)

    def add(self, record: StepRecord) -> None:
        """Take a step; nothing is read from the device."""
        self._window.append(record)

    def close_window(self) -> list[tuple[int, dict[str, float]]]:
        """Read the steps since the last call, and give the metrics of each by its number."""
        points = []
        for record in self._window:
            seconds = self.clock.seconds(record.marks)
            overflow = bool(record.output.overflow)
            self.loss_scale = float(record.output.loss_scale)
            self.num_steps += 1
            self.num_samples += record.num_samples
            self.num_overflows += overflow
            self.data_seconds += record.data_seconds
            if record.skipped:
                self.num_skipped_steps += 1
                self.num_skipped_samples += record.num_samples
            if record.timed and not record.skipped:
                self.step_seconds.append(seconds)
                self.num_timed_samples += record.num_samples
            else:
                self.untimed_seconds += seconds
            values = {
                "train_loss": float(record.output.loss),
                "loss_scale": self.loss_scale,
                "overflow": float(overflow),
                "learning_rate": record.learning_rate,
                "data_seconds": record.data_seconds,
            }
            if record.timed:
                values["step_seconds"] = seconds
            if record.grad_norm is not None:
                values["grad_norm"] = float(record.grad_norm)
            points.append((record.step, values))
        self._window.clear()
        return points

    def summary(
        self, record: Mapping[str, str], test: Mapping[str, float], held: Mapping[str, float], **facts: Any
    ) -> RunSummary:
        """Give the summary of the run."""
        seconds = self.step_seconds
        rate = self.num_timed_samples / math.fsum(seconds) if seconds else None
        return RunSummary(
            record=dict(record),
            test=dict(test),
            held=dict(held),
            num_steps=self.num_steps,
            num_samples=self.num_samples,
            num_timed_steps=len(seconds),
            samples_per_second=rate,
            step_seconds_median=statistics.median(seconds) if seconds else None,
            step_seconds_p95=_percentile(seconds, 0.95) if seconds else None,
            data_seconds=self.data_seconds,
            compute_seconds=math.fsum(seconds) + self.untimed_seconds,
            num_overflows=self.num_overflows,
            num_skipped_steps=self.num_skipped_steps,
            num_skipped_samples=self.num_skipped_samples,
            process_peak_bytes=process_peak_bytes(),
            **facts,
        )


def _percentile(values: list[float], fraction: float) -> float:
    """Give the smallest value that at least `fraction` of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]
