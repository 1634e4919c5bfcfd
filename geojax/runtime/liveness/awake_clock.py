"""The seconds in which this process runs, by which it waits for others.

A process that stood still (SIGSTOP, a suspended machine) heard nobody meanwhile, and nobody is to
blame for that: others may have stood still with it.
"""

import threading
import time


class AwakeClock:
    """Seconds since its start, but for those in which the process stood still.

    Args:
        longest_seconds: most seconds that count between two questions; whoever asks asks more
            often.
    """

    def __init__(self, longest_seconds: float):
        self._longest = longest_seconds
        self._lock = threading.Lock()
        self._latest = time.monotonic()
        self._seconds = 0.0

    def seconds(self) -> float:
        """Return the seconds so far."""
        with self._lock:
            now = time.monotonic()
            self._seconds += min(now - self._latest, self._longest)
            self._latest = now
            return self._seconds
