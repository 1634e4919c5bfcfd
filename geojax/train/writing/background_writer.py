"""A thread that writes what a run tells of itself; training hands it over and never waits.

A full disk, a folder that has vanished or is read-only, or a file system that hangs costs lines of
metrics, but never a step. A warning counts the lost lines at most once a minute, and at the end.
"""

import collections
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self, TypeAlias

Put: TypeAlias = Callable[[str, Callable[[], object]], None]
"""Takes a write, by the subject that failures are counted for."""

_MOST_WAITING = 10_000
"""Writes that may wait for a file system: those of hours, in a few megabytes of memory."""
_WARNING_SECONDS = 60.0
_CLOSING_SECONDS = 30.0


class _Running(NamedTuple):
    """A write that goes on."""

    subject: str
    started: float


def write_at_once(subject: str, write: Callable[[], object]) -> None:
    """Write in this thread: a `Put` for those who wait for it."""
    write()


class BackgroundWriter:
    """One thread, and the queue of what it has to write, while it is entered.

    Args:
        where: place that warnings name: the folder of the files.
        report: shows a line to the user; it must not wait for a file either.
        warning_seconds: pause between two warnings.
        closing_seconds: time at the end for what still waits.
    """

    def __init__(
        self,
        where: object,
        report: Callable[[str], None],
        *,
        warning_seconds: float = _WARNING_SECONDS,
        closing_seconds: float = _CLOSING_SECONDS,
    ):
        self._where, self._report = where, report
        self._warning_seconds, self._closing_seconds = warning_seconds, closing_seconds
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._lost: collections.Counter[str] = collections.Counter()
        self._told = 0
        self._warned: float | None = None
        self._running: _Running | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._work, name="geojax writer", daemon=True)

    @property
    def lost(self) -> int:
        """Number of writes that failed or found no place in the queue."""
        return self._lost.total()

    def put(self, subject: str, write: Callable[[], object]) -> None:
        """Let the thread call `write`, after all before it; return at once.

        Args:
            subject: what it writes, by which failures are counted.
            write: raises where it cannot write.
        """
        waiting = self._queue.qsize()
        if waiting < _MOST_WAITING:
            self._queue.put((subject, write))
        else:
            self._count(subject)
            self._warn(f"{waiting} writes wait already, and no more may")
        running = self._running
        if running is not None:
            seconds = time.monotonic() - running.started
            if seconds >= self._warning_seconds:
                self._warn(f"{running.subject} has not been written for {seconds:.0f} s")

    def put_last(self, subject: str, write: Callable[[], object]) -> None:
        """Let the thread call `write` at the end, which finds a place in a full queue too."""
        self._queue.put((subject, write))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.end(time.monotonic() + self._closing_seconds)

    def end(self, deadline: float) -> None:
        """Wait for what is in the queue, until `deadline`, and tell what is lost."""
        self._queue.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._has_ended = True
        if self._thread.is_alive():
            waiting = self._queue.qsize() - 1  # the last item is no write
            self._report(
                f"warning: {self._where}: does not answer; {waiting} writes wait, and the run ends "
                "without them"
            )
        if self.lost > self._told:
            self._report(f"warning: {self._where}: {self._sentence()}")

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            subject, write = item
            self._running = _Running(subject, time.monotonic())
            try:
                write()
            except Exception as error:  # a picture may fail in any way, and training goes on
                self._count(subject)
                self._warn(_reason(error))
            finally:
                self._running = None

    def _count(self, subject: str) -> None:
        with self._lock:
            self._lost[subject] += 1

    def _warn(self, reason: str) -> None:
        """Tell what is lost, unless that was told in the last minute."""
        now = time.monotonic()
        with self._lock:
            paused = self._warned is not None and now - self._warned < self._warning_seconds
            if paused or self._has_ended:
                return
            self._warned, self._told = now, self._lost.total()
        self._report(f"warning: {self._where}: {reason}; {self._sentence()}; training goes on")

    def _sentence(self) -> str:
        with self._lock:
            counts = ", ".join(f"{count} of {subject}" for subject, count in self._lost.items())
        return f"writes lost so far: {counts or 'none'}"


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return text or type(error).__name__
