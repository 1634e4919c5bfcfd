"""Profiles of some steps of a run: XProf traces and memory snapshots, on one process alone.

Dispatch is asynchronous. Before the first profiled step this process waits for the steps under way,
and after the last one for that step, so that exactly the profiled steps are in the trace. It waits
for their results alone and reads none: whatever the loop decides by a step's metrics it decides as
late as on the other processes, which know nothing of the profile.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax

from geojax.config.profile_settings import ProfileSettings
from geojax.quantities import quantity
from geojax.runtime import ProfileSignal, Watchdog
from geojax.runtime.jax_private import abandon_profile
from geojax.train.services import Log

STEPS_OF_SIGNAL = 3
"""Steps that a signal profiles."""

MEMORY = "memory.pprof"
"""Snapshot of the device memory after the last profiled step."""

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
        self._done = 0
        self._annotation: Any = None

    def begin_step(self, step: int, under_way: Mapping[str, Any] | None) -> None:
        """Begin a step, and a profile if it is the first of one.

        Args:
            step: number of the step, from 1.
            under_way: metrics of the newest step that may still run; None: there is none.
        """
        if self._profiled is None and (last := self._last_of(step)) is not None:
            with self._watchdog.step(step - 1, "profile"):
                jax.block_until_ready(under_way)
                self._start(range(step, last + 1))
        self._annotation = jax.profiler.StepTraceAnnotation(_STEP, step_num=step)
        self._annotation.__enter__()

    def end_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """End the host's part of a step, and the profile if it is the last of it."""
        self._annotation.__exit__(None, None, None)
        self._done = step
        if self._profiled is not None and step == self._profiled[-1]:
            with self._watchdog.step(step, "profile"):
                jax.block_until_ready(metrics)
                self._stop(self._profiled)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._profiled is not None:  # the run ends before its last step
            self._stop(range(self._profiled[0], max(self._done, self._profiled[0]) + 1))

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
        try:
            jax.profiler.start_trace(self._path(steps), profiler_options=options)
        except Exception as error:  # whatever a profiler raises, the run goes on
            self._warn(steps, error)
            return
        self._profiled = steps

    def _stop(self, steps: range) -> None:
        self._profiled = None
        folder = self._path(steps)
        try:
            jax.profiler.stop_trace()
            traces = [file.stat().st_size for file in folder.rglob("*.xplane.pb")]
            if not traces:
                raise OSError(f"no trace was written into {folder}")
            memory = folder / MEMORY
            jax.profiler.save_device_memory_profile(str(memory))
            size = memory.stat().st_size
        except Exception as error:  # a full disk, or whatever a profiler raises
            abandon_profile()
            self._warn(steps, error)
            return
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        of_device = "" if peak is None else f"; peak of {quantity(peak, 'B')} of device memory"
        self._log(
            f"profile of {_named(steps)} on process {self._process}: {quantity(sum(traces), 'B')} "
            f"of trace and {quantity(size, 'B')} of {MEMORY} in {folder}{of_device}"
        )

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
