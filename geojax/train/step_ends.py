"""Times at which steps end, noted by a thread: the host may read a step's metrics much later."""

import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Self

import jax

_POLL_SECONDS = 0.002
"""Between two looks at a step: a step of half a second is timed to half a percent."""


class StepEnds:
    """A thread that waits for the steps of a run, one after the other, while it is entered.

    A trainer whose `step` waits for other sites returns when the step before has long ended, so
    that the time at which the host reads that one says little.
    """

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._note, name="geojax step ends", daemon=True)

    def of(self, metrics: Mapping[str, Any]) -> Future[float]:
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
        while (step := self._steps.get()) is not None:
            metrics, end = step
            while not _all_there(metrics):
                if self._left.wait(_POLL_SECONDS):
                    return
            end.set_result(time.monotonic())


def _all_there(metrics: Mapping[str, Any]) -> bool:
    """Return True if all arrays are computed or have failed: a reader of these gets the error."""
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
    return all(array.is_ready() for array in arrays)
