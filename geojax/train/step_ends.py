"""Times at which steps end, noted by a thread: the host may read a step's metrics much later."""

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Self

import jax


class StepEnds:
    """A thread that waits for the steps of a run, one after the other, while it is entered.

    A trainer whose `step` waits for other sites returns when the step before has long ended, so
    that the time at which the host reads that one says little.
    """

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()

    def of(self, metrics: Mapping[str, Any]) -> Future[float]:
        """Return the time, on the monotonic clock, at which the metrics of a step are there."""
        end: Future[float] = Future()
        self._steps.put((metrics, end))
        return end

    def __enter__(self) -> Self:
        # A daemon: devices that never finish must not keep the process from ending.
        threading.Thread(target=self._wait, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._steps.put(None)

    def _wait(self) -> None:
        while (step := self._steps.get()) is not None:
            metrics, end = step
            with contextlib.suppress(Exception):  # who reads the metrics gets the error
                jax.block_until_ready(metrics)
            end.set_result(time.monotonic())
