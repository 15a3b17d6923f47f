"""SIGTERM as an exception, and moments in which signals wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(SystemExit):
    """SIGTERM reached the main thread during a run; exit status 143 = 128 + 15."""

    def __init__(self) -> None:
        """Carry the exit status."""
        super().__init__(128 + signal.SIGTERM)


class Signals:
    """While open, SIGTERM raises `Terminated`, and `hold` lets SIGTERM and SIGINT wait.

    Outside the main thread it does nothing: Python delivers signals to the main thread only.
    SIGINT goes to the handler that was there before (KeyboardInterrupt, usually).
    """

    def __init__(self) -> None:
        """Start with no signal waiting."""
        self.waiting: int | None = None
        self._holds = 0
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> Signals:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # an ignored signal stays ignored: whoever started this process wanted it so
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        """Put the previous handlers back."""
        for number, handler in self._previous.items():
            # None: set by code that is not Python, out of our reach
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let the first signal wait until the outermost block ends; a second goes through at once."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds and self.waiting is not None:
                number, self.waiting = self.waiting, None
                self._deliver(number, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._holds and self.waiting is None:
            self.waiting = number
        else:
            self._deliver(number, frame)

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process and number == signal.SIGTERM:
            # a forked worker inherits the handler but is no run: it dies as any process would
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif number == signal.SIGTERM:
            raise Terminated
        elif callable(previous := self._previous[number]):
            previous(number, frame)
        else:
            raise KeyboardInterrupt
