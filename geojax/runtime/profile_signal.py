"""A request to profile the next steps: SIGUSR1, which would otherwise end the process."""

import signal
from types import FrameType
from typing import Self


class ProfileSignal:
    """Context in which SIGUSR1 asks for a profile and does nothing else.

    Enter it in the main thread (Python's rule), before anything that takes long: a signal is then
    harmless from the start of the process on.
    """

    def __init__(self) -> None:
        self._asked = False

    def take(self) -> bool:
        """Return True if SIGUSR1 came since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGUSR1, self._receive)
        # Calls of the system go on after the signal: not every library of ours begins them again.
        signal.siginterrupt(signal.SIGUSR1, False)
        return self

    def __exit__(self, *exception: object) -> None:
        # None stands for a handler set outside Python, which cannot be set from here again.
        previous = signal.SIG_DFL if self._previous is None else self._previous
        signal.signal(signal.SIGUSR1, previous)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
