"""The slowest process of one program and the slowest island, by name, in windows of steps.

In one program all processes wait for the slowest, and each step looks equally long to all. So each
process notes figures of its own, and tells them once a window through the key-value store, from a
thread: one message a process and window, and one read of them all by process 0. Nothing is sent
over the devices' network, and no device is waited for.

Islands measure how long each waits, and tell each other with the figures of each step. The slowest
is the one that waits least while all others wait.
"""

import collections
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
from geojax.quantities import duration
from geojax.runtime.key_value_store import publish, published
from geojax.runtime.throttling import throttled_seconds

WINDOW_STEPS = 100
"""Steps of a window, in which each process tells its figures once."""

PRODUCT_STEP = 50
"""Step of a window with the timed product."""

READ_AFTER_STEPS = 10
"""Steps after a window until process 0 reads what all processes told of it."""

_FOLDER = "slowest"
_LEAST_RATIO = 1.4
_LEAST_SHARE = 0.1
"""Share of a step by which a process is later than the others, if it is named."""
_DEVIATIONS = 4.5
_OF_MEDIAN = 1.4826
"""Standard deviation of normal numbers, in units of their median absolute deviation."""
_OF_MEAN = 1.2533
"""Standard deviation of normal numbers, in units of their mean absolute deviation."""
_SLOW_PRODUCTS = 3
"""Windows in a row in which a product is slow, before its process is named."""
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
    late: float
    """Time in a step by which a thread that slept woke too late."""
    throttled: float
    """Time in a step for which the kernel held the process back, by the quota of its cgroup."""
    product: float
    """Time of the product on the process's device."""


_CAUSES = {
    "host": "later with its dispatch",
    "late": "longer stopped or without a core",
    "throttled": "longer held back by the quota of its cgroup",
    "product": "slower in a product on its device",
}


class SlowProcess(NamedTuple):
    """A process that is slower than the others in a window."""

    process: int
    cause: str
    """Name of a figure of `ProcessFigures`."""
    excess: float
    """Seconds beyond the median of the others."""


def slow_process(figures: Mapping[int, ProcessFigures]) -> SlowProcess | None:
    """Return the process that is slower than the others in a window; None: nobody is.

    A process is slower if a figure of its own is 1.4 times the median of the others, lies 4.5 of
    their standard deviations above it, and costs a tenth of a step. Of the product
    there is one time in a window: some of all are far off, so that the deviation is that of all by
    their median, and the cost of one does not count.
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
        process = max(values, key=lambda each: values[each])
        others = [value for each, value in values.items() if each != process]
        middle = statistics.median(others)
        if cause == "product":
            spread = statistics.median(abs(value - middle) for value in values.values())
            deviation = _OF_MEDIAN * spread
        else:
            deviation = _OF_MEAN * statistics.fmean(abs(value - middle) for value in others)
        least = max(_LEAST_RATIO * middle, middle + _DEVIATIONS * deviation)
        excess = values[process] - middle
        if values[process] > least and (cause == "product" or excess > share):
            slow.append(SlowProcess(process, cause, excess))
    return max(slow, key=lambda each: (each.cause != "product", each.excess), default=None)


class SlowSite(NamedTuple):
    """A site that all others wait for."""

    site: str
    excess: float
    """Seconds of a step that each other site waits longer than it, at least."""


def slow_site(waits: Mapping[str, float], seconds: float) -> SlowSite | None:
    """Return the site that all others wait for; None: there is none.

    All others wait 1.4 times as long as it, and a tenth of a step longer.

    Args:
        waits: seconds of a step in which each site waits for others.
        seconds: those of a step.
    """
    if len(waits) < 2:
        return None
    site = min(waits, key=lambda each: waits[each])
    others = min(waited for name, waited in waits.items() if name != site)
    excess = others - waits[site]
    if others < _LEAST_RATIO * waits[site] or excess <= _LEAST_SHARE * seconds:
        return None
    return SlowSite(site, excess)


class NamedWindows:
    """Counts of the windows that named a process or a site as the slowest.

    Args:
        tell: notes an event of a step by its text.
    """

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self._tell = tell
        self.windows = 0
        """Windows so far."""
        self.named: collections.Counter[int | str] = collections.Counter()
        """Windows in which a process or a site was the slowest."""
        self.metrics: Mapping[str, float] = {}
        """Metrics of the last window; empty if it named nobody."""

    def even(self) -> None:
        """Count a window in which nobody was slower than the others."""
        self.windows += 1
        self.metrics = {}

    def slow(self, step: int, name: int | str, excess: float, words: str) -> None:
        """Count a window that named somebody, and tell it.

        Args:
            step: number of the step in which that is known.
            name: index of a process, or name of a site.
            excess: seconds of a step, or of a product, beyond those of the others.
            words: who it is, and by what it is slow.
        """
        self.windows += 1
        self.named[name] += 1
        count = self.named[name]
        metrics = {"slowest/seconds": excess, "slowest/windows": count, "slowest/of": self.windows}
        self.metrics = metrics | ({} if isinstance(name, str) else {"slowest/process": name})
        self._tell(
            step,
            f"{words}; the slowest in {count} of {self.windows} windows of {WINDOW_STEPS} steps",
        )


class SiteWaits:
    """Waits of all sites, in the first process of one of them, and the slowest site by window.

    Args:
        tell: notes an event of a step by its text.
    """

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self.counts = NamedWindows(tell)
        self._waits: dict[str, list[float]] = collections.defaultdict(list)
        self._seconds: list[float] = []

    def add(self, step: int, seconds: float, waits: Mapping[str, float]) -> None:
        """Note the seconds of a step, and the newest waits that are known of each site."""
        self._seconds.append(seconds)
        for site, waited in waits.items():
            self._waits[site].append(waited)
        if step % WINDOW_STEPS:
            return
        means = {site: statistics.fmean(waits) for site, waits in self._waits.items()}
        slow = slow_site(means, statistics.fmean(self._seconds))
        if slow is None:
            self.counts.even()
        else:
            words = (
                f"site {slow.site} waits {duration(means[slow.site])} a step for other sites, and "
                f"each other site waits {duration(slow.excess)} longer"
            )
            self.counts.slow(step, slow.site, slow.excess, words)
        self._waits.clear()
        self._seconds.clear()


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
        self._process, self._product = process, product
        self.counts = NamedWindows(tell)
        self._host: list[float] = []
        self._steps: list[float] = []
        self._throttled = throttled_seconds()
        self._late = self._late_before = 0.0
        self._times: tuple[Future[float], Future[float]] | None = None
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="geojax slowest", daemon=True)
        self._suspects: collections.deque[int | None] = collections.deque(maxlen=_SLOW_PRODUCTS)
        """Processes whose product was slow in the last windows."""

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

    def ended(self, step: int, seconds: float, late_seconds: float) -> None:
        """Note the end of a step; at the end of a window tell its figures.

        Args:
            step: number of the step.
            seconds: its time.
            late_seconds: time of all steps so far by which a thread woke too late.
        """
        self._steps.append(seconds)
        self._late = late_seconds
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
            (self._late - self._late_before) / len(self._steps),
            (throttled - self._throttled) / len(self._steps),
            product,
        )
        self._throttled, self._times, self._late_before = throttled, None, self._late
        self._host.clear()
        self._steps.clear()
        return figures

    def _compare(self, window: int, step: int) -> None:
        """Find the slowest process of a window, on process 0."""
        figures = read_figures(published(_FOLDER), window)
        slow = slow_process(figures)
        # A product or two may be late by chance; a slow device is slow each time.
        suspect = slow.process if slow is not None and slow.cause == "product" else None
        self._suspects.append(suspect)
        if suspect is not None and self._suspects.count(suspect) < _SLOW_PRODUCTS:
            slow = None
        if slow is None:
            self.counts.even()
            return
        who, excess = describe([slow.process]), duration(slow.excess)
        words = f"{who} is {excess} {_CAUSES[slow.cause]} than the others"
        self.counts.slow(step, slow.process, slow.excess, words)

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
