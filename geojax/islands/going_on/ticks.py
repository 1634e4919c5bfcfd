"""The seconds that pass for a process, noticed while its main thread computes."""

import threading
import time

_TICK_SECONDS = 1.0
_LOOK_SECONDS = 0.25


class Ticks:
    """Seconds on the monotonic clock since the start, in pieces of about one second.

    A longer piece tells that the whole process stood still, and not its main thread alone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest = time.monotonic()
        self._passed: list[float] = []
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="geojax ticks", daemon=True).start()

    def take(self) -> list[float]:
        """Return the pieces that have passed since the last call."""
        with self._lock:
            self._look()
            taken, self._passed = self._passed, []
        return taken

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with self._lock:
                self._look()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._latest >= _TICK_SECONDS:
            self._passed.append(now - self._latest)
            self._latest = now
