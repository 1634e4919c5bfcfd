"""The slowest process of one program, by name, in windows of steps.

In one program all processes wait for the slowest, and each step looks equally long to all. So each
process notes figures of its own, and tells them once a window through the key-value store, from a
thread: one message a process and window, and one read of them all by process 0. Nothing is sent
over the devices' network, and no device is waited for.
"""

import contextlib
import json
import math
import queue
import statistics
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

from geojax.job.exit_messages import describe
from geojax.quantities import quantity
from geojax.runtime.key_value_store import publish, published
from geojax.runtime.throttling import throttled_seconds

WINDOW_STEPS = 100
"""Steps of a window, in which each process tells its figures once."""

PRODUCT_STEP = 50
"""Step of a window with the timed product."""

READ_AFTER_STEPS = 10
"""Steps after a window until process 0 reads what all processes told of it."""

_FOLDER = "slowest"
_LEAST_RATIO = 1.5
_LEAST_SHARE = 0.05
"""Share of a step by which a process is later than the others, if it is named."""
_DEVIATIONS = 6.0
_TO_DEVIATION = 1.4826
"""Standard deviation of normal numbers, in units of their median absolute deviation."""
_LEAST_PROCESSES = 3
"""Nobody is named among fewer: of two processes either may be unlike the other."""
_MOST_WAITING = 4
"""Windows that wait for the store; more are left out."""


class ProcessFigures(NamedTuple):
    """Figures of a process in a window, in seconds; nan: not measured."""

    window: int
    step: float
    """Median of the steps."""
    host: float
    """Mean time from the end of a step to the next dispatch."""
    throttled: float
    """Time in a step for which the kernel held the process back, by the quota of its cgroup."""
    product: float
    """Time of the product on the process's device."""


_CAUSES = {
    "host": "later with its dispatch",
    "throttled": "longer held back by the quota of its cgroup",
    "product": "slower in a product on its device",
}


class SlowProcess(NamedTuple):
    """A process that is slower than the others in a window."""

    process: int
    cause: str
    """Name of a figure of `ProcessFigures`."""
    excess: float
    """Seconds beyond the median of all."""


def slow_process(figures: Mapping[int, ProcessFigures]) -> SlowProcess | None:
    """Return the process that is slower than the others in a window; None: nobody is.

    A process is slower if a figure of its own is half as much again as the median of all, lies six
    standard deviations of the others above it, and costs a twentieth of a step. Times of the
    product count by ratio and deviation alone, since there is one in a window.
    """
    steps = [each.step for each in figures.values() if math.isfinite(each.step)]
    if len(figures) < _LEAST_PROCESSES or not steps:
        return None
    share = _LEAST_SHARE * statistics.median(steps)
    slow = []
    for cause in _CAUSES:
        values = {
            process: float(getattr(each, cause))
            for process, each in figures.items()
            if math.isfinite(getattr(each, cause))
        }
        if len(values) < _LEAST_PROCESSES:
            continue
        middle = statistics.median(values.values())
        spread = statistics.median(abs(value - middle) for value in values.values())
        least = max(_LEAST_RATIO * middle, middle + _DEVIATIONS * _TO_DEVIATION * spread)
        process = max(values, key=lambda each: values[each])
        excess = values[process] - middle
        if values[process] > least and (cause == "product" or excess > share):
            slow.append(SlowProcess(process, cause, excess))
    return max(slow, key=lambda each: (each.cause != "product", each.excess), default=None)


class SlowestWatch:
    """The figures of this process, and on process 0 the slowest process of each window.

    Enter it around the loop: it ends its thread.

    Args:
        process: index of this process.
        tell: notes an event of a step on process 0, by its text.
        product: dispatches the timed product after a step's metrics; None: there is none.
    """

    def __init__(
        self,
        process: int,
        tell: Callable[[int, str], None],
        product: Callable[[Any], Any] | None = None,
    ) -> None:
        self._process, self._tell, self._product = process, tell, product
        self._host: list[float] = []
        self._steps: list[float] = []
        self._throttled = throttled_seconds()
        self._times: tuple[Future[float], Future[float]] | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="geojax slowest", daemon=True)
        self._suspect: int | None = None
        """Process whose product was slow in the window before."""
        self.windows = 0
        """Windows of which all figures were read."""
        self.named: dict[int, int] = {}
        """Windows in which a process was the slowest."""
        self.latest: SlowProcess | None = None
        """The slowest process of the last window."""

    def dispatched(
        self,
        step: int,
        seconds_after_end: float,
        metrics: Mapping[str, Any],
        end: Future[float],
        end_of: Callable[[Any], "Future[float]"],
    ) -> None:
        """Note that a step has been dispatched.

        Args:
            step: number of the step.
            seconds_after_end: time since the newest end of a step that is known.
            metrics: those of the step, which runs.
            end: gets the time at which they are there.
            end_of: returns the same of other arrays.
        """
        self._host.append(seconds_after_end)
        if self._product is not None and step % WINDOW_STEPS == PRODUCT_STEP:
            self._times = end, end_of(self._product(metrics["loss"]))

    def ended(self, step: int, seconds: float) -> None:
        """Note the seconds of a step; at the end of a window tell its figures."""
        self._steps.append(seconds)
        if step % WINDOW_STEPS == 0:
            content = json.dumps(self._window(step // WINDOW_STEPS))
            self._call(lambda: publish(f"{_FOLDER}/{self._process}", content))
        elif step % WINDOW_STEPS == READ_AFTER_STEPS and self._process == 0:
            window = step // WINDOW_STEPS
            if window > 0:
                self._call(lambda: self._compare(window, step))

    def _window(self, window: int) -> ProcessFigures:
        throttled = throttled_seconds()
        product = math.nan
        if self._times is not None and all(each.done() for each in self._times):
            before, after = (each.result() for each in self._times)
            product = after - before
        figures = ProcessFigures(
            window,
            statistics.median(self._steps),
            statistics.fmean(self._host) if self._host else math.nan,
            (throttled - self._throttled) / len(self._steps),
            product,
        )
        self._throttled, self._times = throttled, None
        self._host.clear()
        self._steps.clear()
        return figures

    def _compare(self, window: int, step: int) -> None:
        """Find the slowest process of a window, on process 0."""
        figures = read_figures(published(_FOLDER), window)
        slow = slow_process(figures)
        self.windows += 1
        # One product may be late by chance; a slow device is slow twice.
        suspect = slow.process if slow is not None and slow.cause == "product" else None
        if suspect is not None and suspect != self._suspect:
            slow = None
        self._suspect = suspect
        self.latest = slow
        if slow is None:
            return
        count = self.named[slow.process] = self.named.get(slow.process, 0) + 1
        self._tell(
            step,
            f"{describe([slow.process])} is {quantity(slow.excess, 's')} "
            f"{_CAUSES[slow.cause]} than the others; the slowest in {count} of {self.windows} "
            f"windows of {WINDOW_STEPS} steps",
        )

    def _call(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(queue.Full):  # the store does not answer; the watchdog will tell
            self._calls.put_nowait(call)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(1.0)  # a store that does not answer keeps nobody

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            # Another process may have gone: others tell of that, with its name.
            with contextlib.suppress(Exception):
                call()


def read_figures(entries: Mapping[str, str], window: int) -> dict[int, ProcessFigures]:
    """Return the figures of a window by process, without entries that are none."""
    figures = {}
    for name, content in entries.items():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            told = ProcessFigures(*json.loads(content))
            if told.window == window and all(isinstance(each, float) for each in told[1:]):
                figures[int(name)] = told
    return figures
