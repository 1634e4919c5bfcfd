"""The watchdog: ends a process whose step hangs, and names the process that holds up the others.

A process that waits in a collective for one that never arrives would wait forever. The watchdog is
a thread beside the training loop that knows how long steps usually take:

    with Watchdog() as watchdog:
        for step in range(steps):
            with watchdog.step(step):
                ...

When a step takes far longer than those before it, the watchdog writes the stacks of all threads and
one line that names the processes that are behind to stderr, and ends the process with code `HANG`.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Self

import jax
import pydantic

from geojax.exit_codes import HANG
from geojax.quantities import Seconds
from geojax.runtime.liveness.exit_messages import describe
from geojax.runtime.liveness.heartbeat import (
    INTERVAL_SECONDS,
    Heartbeat,
    read_heartbeats,
    report_progress,
)
from geojax.settings import Settings

_STEPS_REMEMBERED = 50
_POLL_SECONDS = 5.0
# Between two readings in which every living process has sent a heartbeat.
_COMPARE_SECONDS = 2.5 * INTERVAL_SECONDS


class WatchdogSettings(Settings):
    """Limits beyond which a step counts as hanging."""

    factor: float = pydantic.Field(default=20.0, gt=1)
    """Multiple of the median duration of the steps before it that a step may take."""
    minimum_seconds: Seconds = 120.0
    """Time that a step may always take: a checkpoint or a busy disk can delay a fast one."""
    first_step_seconds: Seconds = 3600.0
    """Time that the first step may take, which compiles."""


class _RunningStep(NamedTuple):
    number: int
    activity: str
    started: float


class Watchdog:
    """Thread that watches the steps of a loop; enter it around the loop, then `step` in it."""

    def __init__(
        self,
        settings: WatchdogSettings | None = None,
        end_process: Callable[[int], None] = os._exit,
    ):
        self.settings = settings or WatchdogSettings()
        self._end_process = end_process
        self._durations: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_STEPS_REMEMBERED)
        )
        self._running: _RunningStep | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="geojax watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._finished.set()
        self._thread.join()

    @contextlib.contextmanager
    def step(self, number: int, activity: str = "training step") -> Iterator[None]:
        """Watch over the code inside, which is step `number` of the loop.

        Args:
            number: the step, which also goes into the heartbeats of this process.
            activity: the kind of work; each kind has its own first step and usual duration.
        """
        started = time.monotonic()
        report_progress(number, activity)
        self._running = _RunningStep(number, activity, started)
        try:
            yield
        finally:
            self._running = None
        self._durations[activity].append(time.monotonic() - started)

    def limit_seconds(self, activity: str = "training step") -> float:
        """Return how long a step of this kind may take now."""
        durations = self._durations.get(activity)
        if not durations:
            return self.settings.first_step_seconds
        usual = statistics.median(list(durations))
        return max(self.settings.minimum_seconds, self.settings.factor * usual)

    def _watch(self) -> None:
        pause = min(_POLL_SECONDS, self.settings.minimum_seconds / 4)
        while not self._finished.wait(pause):
            running = self._running
            if running is None:
                continue
            elapsed = time.monotonic() - running.started
            limit = self.limit_seconds(running.activity)
            if elapsed > limit and self._running == running:
                self._report_hang(running, elapsed, limit)
                return

    def _report_hang(self, running: _RunningStep, elapsed: float, limit: float) -> None:
        stderr = sys.__stderr__ or sys.stderr
        print(
            f"geojax watchdog: step {running.number} ({running.activity}) has taken "
            f"{elapsed:.0f} s, and its limit is {limit:.0f} s. The stacks of all threads:",
            file=stderr,
            flush=True,
        )
        with contextlib.suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback(file=stderr, all_threads=True)
        # When process 0, which holds the store, is gone, reading it fails or never returns.
        findings = [f"{describe([0])}, which holds the heartbeats, does not answer"]
        reading = threading.Thread(target=self._compare, args=(findings,), daemon=True)
        reading.start()
        reading.join(timeout=2 * _COMPARE_SECONDS)
        print(f"geojax watchdog: {findings[-1]}; ending with code {HANG}", file=stderr, flush=True)
        self._end_process(HANG)

    def _compare(self, findings: list[str]) -> None:
        with contextlib.suppress(Exception):
            count = jax.process_count()
            before = read_heartbeats()
            if count > 1:
                self._finished.wait(_COMPARE_SECONDS)
            findings.append(describe_laggards(before, read_heartbeats(), count))


def describe_laggards(
    before: Mapping[int, Heartbeat], after: Mapping[int, Heartbeat], process_count: int
) -> str:
    """Say in one sentence which processes hold up the others.

    Args:
        before: heartbeats of the processes that have sent any.
        after: the same, read more than one heartbeat interval later.
        process_count: the number of processes of the job.
    """
    if process_count == 1:
        return "this is the only process, so the stacks above show what hangs"
    silent = [
        process
        for process in range(process_count)
        if process not in after or after[process] == before.get(process)
    ]
    if silent:
        return f"no heartbeat from {describe(silent)}"
    furthest = max(heartbeat.step for heartbeat in after.values())
    behind = sorted(process for process in after if after[process].step < furthest)
    if behind:
        slowest = after[behind[0]]
        return (
            f"{describe(behind)} did not reach step {furthest}, but is still at step "
            f"{slowest.step} ({slowest.activity})"
        )
    return f"all {process_count} processes are alive and in step {furthest}: compare their stacks"
