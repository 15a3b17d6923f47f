"""How a process keeps memory: Python's garbage collector while it starts, the C allocator while it trains.

Importing torch and MLflow makes a million objects that live for ever; looking through them again and again takes a
third of the time to the first step. And glibc gives large tensors back to the system at once, so that each step asks
for the same pages anew: up to a third of a small step (figures in `experiments/LOG.md`).
"""

from __future__ import annotations

import ctypes
import gc
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_paused = False
_keeps = False


def pause(*, keep: bool = False) -> None:
    """Pause the collector until `resume`; one that the user switched off stays as it is.

    `keep`: what was made by then is never looked through again, and freed memory is kept; for a process that is ours.
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
            keep_freed_memory()
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


def keep_freed_memory() -> bool:
    """Make glibc keep what a tensor frees for the next one, for the rest of the process; elsewhere False."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, _LIMIT) for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LIMIT = 2**31 - 1
