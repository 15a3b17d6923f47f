"""Python's garbage collector, paused while a process starts.

Importing torch and MLflow makes a million objects that live for ever; looking through them again and again takes a
third of the time to the first step (figures in `experiments/LOG.md`).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False
_keeps = False


def pause(*, keep: bool = False) -> None:
    """Pause the collector until `resume`; one that the user switched off stays as it is.

    `keep`: what was made by then is never looked through again; for a process that is ours.
    """
    global _paused, _keeps
    if gc.isenabled():
        gc.disable()
        _paused, _keeps = True, keep


def resume() -> None:
    """Let the collector go on if `pause` stopped it."""
    global _paused
    if _paused:
        if _keeps:
            gc.freeze()
        gc.enable()
        _paused = False


@contextmanager
def paused(*, keep: bool = False) -> Iterator[None]:
    """Pause the collector for a block, or up to a `resume` inside it."""
    pause(keep=keep)
    try:
        yield
    finally:
        resume()
