"""The watchdog: ends a process whose step hangs, and names the process that holds up the others.

A process that waits in a collective for one that never arrives would wait forever. The watchdog is
a thread beside the training loop that knows how long steps usually take:

    with Watchdog() as watchdog:
        for step in range(steps):
            with watchdog.step(step):
                ...

Each kind of work (a training step, a batch of data or validation, a save) has limits of its own,
and time for the other processes to complete the kind before it. Between them the clock runs for
"host work", so that it runs whenever no step has ended; before and after the loop it runs for the
phase that `begin` names. When work takes longer, the watchdog writes two things to stderr: the
stacks of all threads, and one line that names the late processes. It then ends the process with
code `HANG`, or with `FAILURE` where the process waits for another job.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Self, TypeAlias

import jax
import pydantic

from geojax.exit_codes import FAILURE, HANG
from geojax.job.exit_messages import describe
from geojax.quantities import Seconds
from geojax.runtime.liveness.health import Health, await_health, read_health
from geojax.runtime.liveness.heartbeat import report_progress
from geojax.settings import Settings

_STEPS_REMEMBERED = 50
_POLL_SECONDS = 5.0
# Enough for a new report of process 0.
_COMPARE_SECONDS = 10.0
_REPORT_SECONDS = 2 * _COMPARE_SECONDS


WorkKind: TypeAlias = Literal[
    "start",
    "data",
    "dispatch",
    "training step",
    "validation",
    "save",
    "profile",
    "plan",
    "host work",
    "end",
    "probe",
]
"""Kinds of work that is watched; a training step begins with its dispatch by the host."""

_PHASES = ("start", "plan", "end")
"""Kinds in which programs may be compiled and other processes waited for."""

_LONGEST_LIMIT = 1e7


class WatchdogSettings(Settings):
    """Limits beyond which a step counts as hanging, by kind of work."""

    factor: float = pydantic.Field(default=20.0, gt=1, le=1e6)
    """Limit of a step, as a multiple of the median duration of earlier work of the same kind."""
    minimum_seconds: Seconds = pydantic.Field(default=120.0, ge=0.1, le=_LONGEST_LIMIT)
    """Time that a step may always take, because a busy network can delay a fast one."""
    first_step_seconds: Seconds = pydantic.Field(default=3600.0, ge=0.1, le=_LONGEST_LIMIT)
    """Time that the first training step, which compiles, and the first batch of data may take. The
    start of a run, once all processes have joined, and its end may take `minimum_seconds` more."""
    first_validation_seconds: Seconds = pydantic.Field(default=3600.0, ge=0.1, le=_LONGEST_LIMIT)
    """Time that the first batch of validation, which compiles, may take."""
    save_seconds: Seconds = pydantic.Field(default=1800.0, ge=0.1, le=_LONGEST_LIMIT)
    """Time that the blocking part of a save, or the writing of a profile, may always take, because
    storage may be busy for long."""

    def first_limit(self, kind: WorkKind) -> float:
        """Return how long the first work of its kind may take."""
        limits: dict[WorkKind, float] = {
            "validation": self.first_validation_seconds,
            "save": self.save_seconds,
            "profile": self.save_seconds,
            "host work": self.minimum_seconds,
        }
        if kind in _PHASES:  # barriers have the shorter limit, and a better message
            return self.first_step_seconds + self.minimum_seconds
        return limits.get(kind, self.first_step_seconds)

    def later_minimum(self, kind: WorkKind) -> float:
        """Return how long work of its kind may take later, however fast it was before."""
        return self.save_seconds if kind in ("save", "profile") else self.minimum_seconds


class _RunningStep(NamedTuple):
    number: int
    kind: WorkKind
    started: float
    limit: float


class Watchdog:
    """Thread that watches the steps of a loop; enter it around the loop, then `step` in it.

    Attributes:
        missing, decides: see the arguments; they may be set later.

    Args:
        settings: the limits.
        end_process: ends the process with an exit code.
        missing: returns what another job has not done that this process waits for, and names that
            job; None: it does not wait for one.
        decides: returns True while other jobs may be lost, and who goes on is not decided; that
            time counts for nothing.
    """

    def __init__(
        self,
        settings: WatchdogSettings | None = None,
        end_process: Callable[[int], None] = os._exit,
        missing: Callable[[], str | None] = lambda: None,
        decides: Callable[[], bool] = lambda: False,
    ):
        self.settings = settings or WatchdogSettings()
        self._end_process, self.missing, self.decides = end_process, missing, decides
        self._durations: defaultdict[WorkKind, deque[float]] = defaultdict(
            lambda: deque(maxlen=_STEPS_REMEMBERED)
        )
        self._between: WorkKind | None = None
        self._number = 0
        self._running: _RunningStep | None = None
        self._previous: WorkKind | None = None
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="geojax watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._finished.set()
        self._thread.join()

    def begin(self, kind: WorkKind, number: int = 0) -> None:
        """Count the time that belongs to no step as this kind from now on.

        Args:
            kind: a phase, or "host work" of a loop.
            number: the step that messages name until the next one begins.
        """
        self._between, self._number = kind, number
        self._running = self._work_between()

    @contextlib.contextmanager
    def step(self, number: int, kind: WorkKind = "training step") -> Iterator[None]:
        """Watch over the code inside, which is step `number` of the loop.

        Args:
            number: the step, which also goes into the heartbeats of this process.
            kind: the kind of work; each has its own first limit and usual duration.
        """
        report_progress(number, kind)
        with self._watch_over(number, kind):
            yield
        self._previous = kind

    def dispatch(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Watch over the dispatch of step `number`, in which islands wait for their messages.

        Heartbeats tell of steps that are read back, and of no dispatch ahead of them.
        """
        return self._watch_over(number, "dispatch")

    def data(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Watch over the wait for the batch of step `number`, ahead of its dispatch."""
        return self._watch_over(number, "data")

    def _work_between(self) -> _RunningStep | None:
        if self._between is None:
            return None
        limit = self.settings.first_limit(self._between)
        return _RunningStep(self._number, self._between, time.monotonic(), limit)

    @contextlib.contextmanager
    def _watch_over(self, number: int, kind: WorkKind) -> Iterator[None]:
        started = time.monotonic()
        self._number = number
        self._running = _RunningStep(number, kind, started, self.limit_seconds(kind))
        try:
            with jax.profiler.TraceAnnotation(kind, step=number):
                yield
        finally:
            self._running = self._work_between()
        self._durations[kind].append(time.monotonic() - started)

    def expect_first_step(self) -> None:
        """Let the next work of each kind take as long as the first: its program is a new one."""
        self._durations.clear()

    def limit_seconds(self, kind: WorkKind = "training step") -> float:
        """Return how long work of this kind may take now.

        The first work after another kind may wait for a process that still does the other, and a
        dispatch for the step before.
        """
        limit, like = self._own_limit(kind), kind
        if kind == "dispatch":
            like = "training step"
            limit = max(limit, self._own_limit(like))
        if self._previous is not None and self._previous != like:
            limit += self._own_limit(self._previous)
        return limit

    def _own_limit(self, kind: WorkKind) -> float:
        durations = self._durations.get(kind)
        if not durations:
            return self.settings.first_limit(kind)
        usual = statistics.median(durations)
        return max(self.settings.later_minimum(kind), self.settings.factor * usual)

    def _watch(self) -> None:
        pause = min(_POLL_SECONDS, self.settings.minimum_seconds / 4)
        while not self._finished.wait(pause):
            running = self._running
            if running is None:
                continue
            if self.decides():
                if self._running == running:
                    self._running = running._replace(started=time.monotonic())
                continue
            elapsed = time.monotonic() - running.started
            if elapsed > running.limit and self._running == running:
                # Output may go to the very file system that does not answer.
                codes = [HANG]
                arguments = (running, elapsed, codes)
                report = threading.Thread(target=self._report_hang, args=arguments, daemon=True)
                report.start()
                report.join(_REPORT_SECONDS)
                self._end_process(codes[-1])
                return

    def _report_hang(self, running: _RunningStep, elapsed: float, codes: list[int]) -> None:
        stderr = sys.__stderr__ or sys.stderr
        print(
            f"geojax watchdog: step {running.number} ({running.kind}) has taken "
            f"{elapsed:.0f} s, and its limit is {running.limit:.0f} s. The stacks of all threads:",
            file=stderr,
            flush=True,
        )
        with contextlib.suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback(file=stderr, all_threads=True)
        # When process 0, which holds the store, is gone, reading it fails or never returns.
        findings = [f"{describe([0])}, which holds the heartbeats, does not answer"]
        reading = threading.Thread(target=self._compare, args=(findings,), daemon=True)
        reading.start()
        reading.join(_COMPARE_SECONDS)
        finding = findings[-1]
        if (missing := self.missing()) is not None:
            finding = missing
            codes.append(FAILURE)
        print(f"geojax watchdog: {finding}; ending with code {codes[-1]}", file=stderr, flush=True)

    def _compare(self, findings: list[str]) -> None:
        with contextlib.suppress(Exception):
            if jax.process_count() == 1:
                findings.append("this is the only process, so the stacks above show what hangs")
                return
            newest = read_health()
            health = await_health(newest.number if newest else 0)
            if health is not None:
                findings.append(describe_laggards(health, jax.process_count()))


def describe_laggards(health: Health, process_count: int) -> str:
    """Say in one sentence which processes hold up the others."""
    if health.quiet.size:
        return f"no heartbeat from {health.quiet}"
    if health.behind.size:
        step, activity = health.at
        return (
            f"{health.behind} did not reach step {health.furthest}, but is still at step {step} "
            f"({activity})"
        )
    return (
        f"all {process_count} processes are alive and in step {health.furthest}: compare their "
        "stacks"
    )
