"""Graceful stop: the first Ctrl-C or SIGTERM asks the run to stop, a second Ctrl-C ends it."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

# What signal.signal takes and returns; None for a handler that was not set from Python.
_Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignals:
    """Context in which SIGINT and SIGTERM set `requested` and do nothing else.

        with StopSignals() as stop:
            while step < steps and not stop.requested:
                ...

    A second SIGINT raises KeyboardInterrupt. Enter it in the main thread (Python's rule). Processes
    of one job hear their signals at different times: let them agree (a maximum over `requested`
    inside the step) before any of them leaves the loop.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, _Handler] = {}

    @property
    def requested(self) -> bool:
        """True once a signal has asked this process to stop."""
        return self.received is not None

    @property
    def exit_code(self) -> int:
        """Exit code that a shell expects after the received signal: 130 for Ctrl-C."""
        return 0 if self.received is None else 128 + self.received

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler set outside Python, which cannot be set from here again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
