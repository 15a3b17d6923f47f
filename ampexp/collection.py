"""Python's garbage collector, paused while a process starts.

Importing torch and MLflow makes a million objects that live for ever; looking through them again and again takes a
third of the time to the first step (figures in `experiments/LOG.md`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False


def pause() -> None:
    """Pause the collector until `resume`; one that the user switched off stays as it is."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume() -> None:
    """Let the collector go on if `pause` stopped it."""
    global _paused
    if _paused:
        gc.enable()
        _paused = False


@contextmanager
def paused() -> Iterator[None]:
    """Pause the collector for a block, or up to a `resume` inside it."""
    pause()
    try:
        yield
    finally:
        resume()
