"""Ends a process whose step hangs, and says where it hangs and which process is behind.

A process that waits in a collective for one that never comes would wait for ever. The watchdog is
a thread beside the training loop that knows how long steps usually take:

    with Watchdog() as watchdog:
        for step in range(steps):
            with watchdog.step(step):
                ...

When a step lasts far longer than its predecessors, it writes the stacks of all threads and one line
that names the processes that are behind to stderr, and ends the process with `HANGING`.
"""

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

import jax
import jax.errors
import pydantic

from geojax.exit_codes import HANGING
from geojax.quantities import Seconds
from geojax.runtime.coordination import describe
from geojax.runtime.key_value_store import publish, published
from geojax.settings import Settings


class WatchdogSettings(Settings):
    """When a step counts as hanging."""

    factor: float = pydantic.Field(default=20.0, gt=1)
    """A step may take this many times the median of the steps before it."""
    minimum_seconds: Seconds = 120.0
    """But never less than this: a checkpoint or a busy disk may hold up a step of milliseconds."""
    first_step_seconds: Seconds = 3600.0
    """Limit of the first step, which compiles."""
    heartbeat_seconds: float = pydantic.Field(default=5.0, gt=0)
    """How often the process tells the others its step."""


class Watchdog:
    """See the module. Enter it around the loop; it costs the loop two assignments a step."""

    def __init__(
        self,
        settings: WatchdogSettings | None = None,
        end_process: Callable[[int], None] = os._exit,
    ):
        self.settings = settings or WatchdogSettings()
        self._end_process = end_process
        self._durations: deque[float] = deque(maxlen=50)
        self._current: tuple[int, float] | None = None  # the step that runs, and since when
        self._latest = -1
        self._beats = 0
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="geojax watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._finished.set()
        self._thread.join()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Watch over what runs inside: step `number` of the loop."""
        started = time.monotonic()
        self._latest = number
        self._current = (number, started)
        try:
            yield
        finally:
            self._current = None
        self._durations.append(time.monotonic() - started)

    @property
    def limit_seconds(self) -> float:
        """How long the step that runs now may take."""
        if not self._durations:
            return self.settings.first_step_seconds
        usual = statistics.median(list(self._durations))
        return max(self.settings.minimum_seconds, self.settings.factor * usual)

    def _watch(self) -> None:
        pause = min(self.settings.heartbeat_seconds, self.settings.minimum_seconds / 4)
        while not self._finished.wait(pause):
            self._beat()
            current = self._current
            if current is None:
                continue
            number, started = current
            lasted, limit = time.monotonic() - started, self.limit_seconds
            if lasted > limit and self._current == current:
                self._bark(number, lasted, limit)
                return

    def _beat(self) -> None:
        self._beats += 1
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # who is gone is said elsewhere
            publish(f"heartbeat/{jax.process_index()}", f"{self._latest} {self._beats}")

    def _bark(self, number: int, lasted: float, limit: float) -> None:
        stderr = sys.__stderr__ or sys.stderr
        print(
            f"geojax watchdog: step {number} has taken {lasted:.0f} s, and the steps before it let "
            f"expect at most {limit:.0f} s. The stacks of all threads:",
            file=stderr,
            flush=True,
        )
        with contextlib.suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback(file=stderr, all_threads=True)
        # The store lives in process 0: when that is what died, asking fails or hangs.
        verdict = [f"{describe([0])}, which holds the heartbeats, does not answer"]
        inquiry = threading.Thread(target=self._inquire, args=(verdict,), daemon=True)
        inquiry.start()
        inquiry.join(timeout=3 * self.settings.heartbeat_seconds + 5)
        print(
            f"geojax watchdog: {verdict[-1]}; ending with code {HANGING}", file=stderr, flush=True
        )
        self._end_process(HANGING)

    def _inquire(self, verdict: list[str]) -> None:
        with contextlib.suppress(Exception):
            self._beat()
            before = _heartbeats()
            self._finished.wait(2 * self.settings.heartbeat_seconds)
            self._beat()
            verdict.append(who_is_behind(before, _heartbeats(), jax.process_count()))


def _heartbeats() -> dict[int, tuple[int, int]]:
    """Each process's latest step and its number of heartbeats so far."""
    return {
        int(process): (int(note.split()[0]), int(note.split()[1]))
        for process, note in published("heartbeat").items()
    }


def who_is_behind(
    before: dict[int, tuple[int, int]], after: dict[int, tuple[int, int]], process_count: int
) -> str:
    """One sentence on which processes hold up the others.

    `before` and `after` map processes to (latest step, heartbeats so far), read more than one
    heartbeat apart. No clocks are compared: a process whose count stood still is silent.
    """
    if process_count == 1:
        return "this is the only process, so the stacks above show what hangs"
    absent = [process for process in range(process_count) if process not in after]
    silent = [
        process for process in after if process in before and before[process] == after[process]
    ]
    if absent or silent:
        return f"no sign of life from {describe(sorted(absent + silent))}"
    steps = {process: step for process, (step, _) in after.items()}
    furthest = max(steps.values())
    behind = sorted(process for process, step in steps.items() if step < furthest)
    if behind:
        return (
            f"{describe(behind)} did not come to step {furthest}, at step {steps[behind[0]]} still"
        )
    return f"all {process_count} processes are alive and in step {furthest}: compare their stacks"
