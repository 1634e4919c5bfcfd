"""Threads that wait in XLA for what has been fetched, one for each fetch under way.

They end when their fetches have arrived or been made to fail. Nobody may leave one behind: a thread
that blocks in XLA while Python ends aborts the process.
"""

import queue
import threading
from collections.abc import Callable


class Arrivals:
    """Threads that are started when they are needed, and used again."""

    def __init__(self) -> None:
        self._waits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def begin(self, wait: Callable[[], None]) -> None:
        """Call `wait` in a thread; no other call waits for it."""
        self._waits.put(wait)
        if not self._idle.acquire(blocking=False):
            thread = threading.Thread(target=self._run, name="geojax arrivals", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """End all threads; what they wait for has been made to fail."""
        for _ in self._threads:
            self._waits.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (wait := self._waits.get()) is not None:
            wait()
            self._idle.release()
