"""Profiles of some steps of a run: XProf traces and memory snapshots, on one process alone.

Dispatch is asynchronous. Before the first profiled step this process waits for the steps under way,
and after the last one for that step, so that exactly the profiled steps are in the trace. It reads
no result: whatever the loop decides by a step's metrics it decides as late as on the other
processes, which know nothing of the profile.
"""

import contextlib
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import jax

from geojax.config.profile_settings import ProfileSettings
from geojax.quantities import quantity
from geojax.runtime import ProfileSignal, Watchdog
from geojax.runtime.jax_private import abandon_profile
from geojax.train.facts import peak_memory
from geojax.train.services import Log

STEPS_OF_SIGNAL = 3
"""Steps that a signal profiles."""

MEMORY = "memory.pprof"
"""Snapshot of the device memory after the last profiled step."""

HOLD_SECONDS = 30.0
"""Most seconds that the run waits for a trace. Nothing is recorded any more long before, and the
watchdogs of other processes, which wait for this one, have patience for longer."""

_STEP = "train"
"""Name of a step in the trace, by which XProf finds steps."""


class StepProfiler:
    """The profiles of one process; a failure of one is a line in the log.

    Enter it around the loop: it ends a profile that the loop leaves.

    Args:
        folder: where the folder of each profile is made.
        settings: the steps to profile.
        process: index of this process.
        watchdog: gets to know that this process waits, or writes a profile.
        log: shows a line to the user.
        signal: asks for a profile of the next steps; None: nothing does.
    """

    def __init__(
        self,
        folder: Path,
        settings: ProfileSettings,
        process: int,
        watchdog: Watchdog,
        log: Log,
        signal: ProfileSignal | None = None,
    ) -> None:
        self._folder, self._process = folder, process
        self._watchdog, self._log, self._signal = watchdog, log, signal
        self._wanted = settings.first_and_last if process in settings.processes else None
        self._profiled: range | None = None
        self._earlier: frozenset[Path] = frozenset()
        """Files of earlier attempts in the folder of the profile."""
        self._writer: threading.Thread | None = None
        """Thread that writes a profile."""
        self.held_until = 0.0
        """Time, on the monotonic clock, until which a profile kept the host from its next step."""
        self._done = 0
        self._annotation: Any = None

    def begin_step(self, step: int, under_way: Future[float] | None) -> None:
        """Begin a step, and a profile if it is the first of one.

        Args:
            step: number of the step, from 1.
            under_way: end of the newest step that may still run; None: there is none.
        """
        is_free = self._profiled is None and not self._is_writing
        if is_free and (last := self._last_of(step)) is not None:
            if under_way is not None:
                with self._watchdog.step(step - 1):
                    under_way.result()
            with self._watchdog.step(step - 1, "profile"):
                self._start(range(step, last + 1))
            self.held_until = time.monotonic()
        self._annotation = jax.profiler.StepTraceAnnotation(_STEP, step_num=step)
        self._annotation.__enter__()

    def end_step(self, step: int, end: Future[float]) -> None:
        """End the host's part of a step, and at the step's end the profile if it is its last."""
        self._annotation.__exit__(None, None, None)
        self._done = step
        if self._profiled is not None and step == self._profiled[-1]:
            with self._watchdog.step(step):
                end.result()
            with self._watchdog.step(step, "profile"):
                self._stop(self._profiled, HOLD_SECONDS)
            self.held_until = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._profiled is None and not self._is_writing:
            return
        seconds = None if exception[0] is None else HOLD_SECONDS
        with self._watchdog.step(self._done, "profile"):
            if self._profiled is not None:  # the run ends before its last step
                first = self._profiled[0]
                self._stop(range(first, max(self._done, first) + 1), seconds)
            elif self._writer is not None:
                self._writer.join(seconds)

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _last_of(self, step: int) -> int | None:
        """Return the last step of a profile that begins with `step`; None: none does."""
        if self._wanted is not None:
            first, last = self._wanted
            if step >= first:
                self._wanted = None
            if first <= step <= last:
                return last
            if step > last:
                self._log(f"note: profile.start: step {last} is done already and not profiled")
        if self._signal is not None and self._signal.take():
            return step + STEPS_OF_SIGNAL - 1
        return None

    def _start(self, steps: range) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every call of Python would hide the steps
        folder = self._path(steps)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._earlier = frozenset(folder.rglob("*"))
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception as error:  # whatever a profiler raises, the run goes on
            self._warn(steps, error)
            return
        self._profiled = steps

    def _stop(self, steps: range, seconds: float | None) -> None:
        """Write the profile of these steps, and wait so many seconds for it; None: to its end."""
        self._profiled = None
        self._writer = threading.Thread(
            target=self._write, args=(steps,), name="geojax profile", daemon=True
        )
        self._writer.start()
        self._writer.join(seconds)

    def _write(self, steps: range) -> None:
        folder = self._path(steps)
        memory = folder / MEMORY
        try:
            try:
                jax.profiler.save_device_memory_profile(str(memory))
            finally:
                jax.profiler.stop_trace()
            traces = set(folder.rglob("*.xplane.pb")) - self._earlier
            if not traces:
                raise OSError(f"no trace was written into {folder}")
            of_trace, of_memory = sum(each.stat().st_size for each in traces), memory.stat().st_size
        except Exception as error:  # a full disk, or whatever a profiler raises
            abandon_profile()
            self._remove_parts(folder)
            self._warn(steps, error)
            return
        peak = peak_memory().get("memory/peak_bytes")
        of_device = "" if peak is None else f"; peak of {quantity(peak, 'B')} of device memory"
        self._log(
            f"profile of {_named(steps)} on process {self._process}: {quantity(of_trace, 'B')} of "
            f"trace and {quantity(of_memory, 'B')} of {MEMORY} in {folder}{of_device}"
        )

    def _remove_parts(self, folder: Path) -> None:
        """Remove what was written before the disk was full: checkpoints need the room."""
        with contextlib.suppress(OSError):
            for path in set(folder.rglob("*")) - self._earlier:
                if path.is_file():
                    path.unlink()

    def _warn(self, steps: range, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        self._log(
            f"warning: no profile of {_named(steps)} on process {self._process} ({reason}); the "
            "run goes on"
        )

    def _path(self, steps: range) -> Path:
        return self._folder / f"step-{steps[0]:08d}" / f"process-{self._process}"


def _named(steps: range) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
