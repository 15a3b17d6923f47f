"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ampexp.trainer import EpochRecord, StepRecord

REFRESH_SECONDS = 0.2


class Progress(Protocol):
    """Is told of each step and each epoch."""

    def step(self, record: StepRecord) -> None:
        """See a step."""

    def epoch(self, record: EpochRecord) -> None:
        """See an epoch's end."""


class Silent:
    """Shows nothing."""

    def step(self, record: StepRecord) -> None:
        """Pass."""

    def epoch(self, record: EpochRecord) -> None:
        """Pass."""


class Lines:
    """One plain line an epoch, on stderr."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.started = time.monotonic()
        self.samples = 0
        self.last: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        """Count."""
        self.samples += record.num_samples
        self.last = record

    def epoch(self, record: EpochRecord) -> None:
        """Print how far the run is."""
        print(f"epoch {record.epoch + 1}: {self.text()}{_held(record)}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """Give step, rate over everything so far, loss, scale and the time left."""
        if self.last is None:
            return "no step"
        elapsed = time.monotonic() - self.started
        done = self.last.step + 1
        left = elapsed / done * (self.total_steps - done)
        return (
            f"step {done}/{self.total_steps}  {self.samples / elapsed:,.0f} samples/s overall  "
            f"loss {float(self.last.output.loss):.4f}  scale {float(self.last.output.loss_scale):g}  ETA {left:.0f} s"
        )


class Bar(Lines):
    """A bar with rate, loss, scale and time left; it reads the device a few times a second only."""

    def __init__(self, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress

        super().__init__(total_steps)
        console = Console(stderr=True)
        self.bar = RichProgress(BarColumn(), TextColumn("{task.description}"), console=console, auto_refresh=False)
        self.task = self.bar.add_task("", total=total_steps)
        self.refreshed = 0.0

    def step(self, record: StepRecord) -> None:
        """Move the bar."""
        super().step(record)
        now = time.monotonic()
        if now - self.refreshed > REFRESH_SECONDS or record.step + 1 == self.total_steps:
            self.refreshed = now
            self.bar.update(self.task, completed=record.step + 1, description=self.text(), refresh=True)

    def epoch(self, record: EpochRecord) -> None:
        """Print the held part's result above the bar."""
        if record.held:
            self.bar.console.print(f"epoch {record.epoch + 1}{_held(record)}", highlight=False)


@contextmanager
def open_progress(kind: str, total_steps: int) -> Iterator[Progress]:
    """Open the display: `bar`, `lines`, `none`, or `auto` (a bar on a terminal, lines elsewhere)."""
    if kind == "auto":
        kind = "bar" if sys.stderr.isatty() else "lines"
    if kind == "bar":
        display = Bar(total_steps)
        with display.bar:
            yield display
    else:
        yield Lines(total_steps) if kind == "lines" else Silent()


def _held(record: EpochRecord) -> str:
    values = "  ".join(f"{key} {value:.4f}" for key, value in record.held.items())
    return f"  held part: {values}" if values else ""
