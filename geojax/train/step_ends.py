"""The times at which the steps of a run end, noted by a thread that never blocks in XLA."""

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Self

import jax

_POLL_SECONDS = 0.002
"""Between two looks at a step, at least: a step of half a second is timed to half a percent."""
_POLL_SHARE = 1 / 200
"""Share of a long step between two looks near its end, and ten times that before."""
_NEAR_END = 0.8
"""Share of the step before after which a step may end soon."""


class StepEnds:
    """A thread that waits for the steps of a run, one after the other, while it is entered.

    A trainer whose `step` waits for other sites returns when the step before has long ended, so
    that the time at which the host reads that one says little.
    """

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._note, name="geojax step ends", daemon=True)
        self.late_seconds = 0.0
        """Sum of the time by which the thread woke later than it had asked for."""

    def of(self, metrics: Any) -> Future[float]:
        """Return the time, on the monotonic clock, at which the metrics of a step are there."""
        end: Future[float] = Future()
        self._steps.put((metrics, end))
        return end

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        self._steps.put(None)
        self._thread.join()

    def _note(self) -> None:
        # The thread looks instead of blocking in XLA: devices that never finish must not keep the
        # process from ending, and a thread that blocks there while Python ends aborts the process.
        usual = 0.0
        while (step := self._steps.get()) is not None:
            metrics, end = step
            arrays = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
            began = now = time.monotonic()
            while not _all_there(arrays):
                pause = _pause(now - began, usual)
                if self._left.wait(pause):
                    return
                before, now = now, time.monotonic()
                self.late_seconds += max(now - before - pause, 0.0)
            end.set_result(now)
            usual = now - began


def _pause(elapsed: float, usual: float) -> float:
    """Return the time until the next look at a step, of which there are less than 60 near `usual`.

    Args:
        elapsed: seconds since the first look.
        usual: seconds that the step before took.
    """
    share = _POLL_SHARE if elapsed >= _NEAR_END * usual else 10 * _POLL_SHARE
    return max(_POLL_SECONDS, share * max(usual, elapsed))


def _all_there(arrays: Sequence[Any]) -> bool:
    """Return True if all arrays are computed or have failed: a reader of these gets the error."""
    return all(array.is_ready() for array in arrays)
