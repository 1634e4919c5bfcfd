"""The checkpointer: saves the training state in the background, restores it onto any mesh."""

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.errors
import orbax.checkpoint as ocp

from geojax.checkpoint import manifest
from geojax.checkpoint.agreement import first_text, number_of_first_process
from geojax.checkpoint.compatibility import (
    describe_arrays,
    refuse_other_arrays,
    refuse_other_model,
)
from geojax.checkpoint.folder import (
    committed_steps,
    interrupted_steps,
    remove_leftovers,
    remove_old,
    set_aside,
)
from geojax.checkpoint.handler import RestoreState, SaveState, StateHandler
from geojax.errors import LostContactError, RunError, UserError
from geojax.runtime import translate_collective_errors
from geojax.runtime.liveness.exit_messages import first_line

State = TypeVar("State")
Result = TypeVar("Result")
_logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 10.0, 60.0, 120.0)
"""Seconds from the first, second, ... failed save in a row to the next; one more ends the run."""


class _Save(NamedTuple):
    """A save that goes on in the background."""

    step: int
    finished: "Future[None]"

    @property
    def has_failed(self) -> bool:
        """True if this process has seen that it failed."""
        return self.finished.done() and self.finished.exception() is not None


class Checkpointer:
    """The checkpoints of one run: `folder/<step>`, the newest `keep` of them.

    `save` returns when the arrays have been copied off the devices; writing, checksums, the commit
    and the removal of old checkpoints go on in the background. A checkpoint is committed by one
    rename and carries the checksums of its files, so a process killed at any moment leaves the
    checkpoints before it whole, and damage done later is found.

    A save that fails (a full disk, a file system that is away for a while) is a warning; `due` asks
    for the next one after a pause. When too many in a row have failed, the run ends.

    With several processes of one JAX runtime every process calls every method, and `folder` lies
    on a file system that they share.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        interval: int | None = None,
        interval_minutes: float | None = None,
        report: Callable[[str], None] = _logger.warning,
    ) -> None:
        """Open `folder`, which is made if needed.

        Args:
            folder: folder of the checkpoints.
            keep: number of checkpoints to keep.
            interval: `should_save` is true for multiples of this step number.
            interval_minutes: `due` is true when the last save is at least this long ago.
            report: called with a line about a damaged, interrupted or set aside checkpoint, on
                process 0 only.

        Raises:
            UserError: `folder` cannot be made, or a process does not see what process 0 writes.
        """
        assert keep >= 1, f"keep must be at least 1, not {keep}"
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._interval = interval
        self._interval_minutes = interval_minutes
        self._first_process = jax.process_index() == 0
        self._report = report if self._first_process else lambda line: None
        self._last_save = time.monotonic()
        self._newest_step: int | None = None
        self._damaged_steps: list[int] = []
        self._open_folder()
        logging.getLogger("absl").addFilter(_is_not_raised_too)
        self._orbax = ocp.AsyncCheckpointer(StateHandler())
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: _Save | None = None
        self._failures_in_a_row = 0
        self.failed_saves = 0
        """Saves of this run that failed."""
        self.blocked_seconds = 0.0
        """Seconds of this run for which training waited in `save`."""

    def should_save(self, step: int) -> bool:
        """Return whether a checkpoint is due at `step` by the number of steps."""
        return self._interval is not None and step > 0 and step % self._interval == 0

    def due(self, now: float | None = None) -> bool:
        """Return whether a checkpoint is due by time, or because the last save failed.

        Clocks differ, and so do disks: with several processes all save if any of them says so.
        `now` is in seconds of `time.monotonic()`.
        """
        now = time.monotonic() if now is None else now
        if self._saving is not None and self._saving.has_failed:
            return now - self._last_save >= _pause_after(self._failures_in_a_row + 1)
        return (
            self._interval_minutes is not None
            and now - self._last_save >= 60 * self._interval_minutes
        )

    def latest_steps(self) -> list[int]:
        """List the steps of the committed checkpoints, newest first; they may be damaged."""
        return committed_steps(self.folder)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Save `state` as the checkpoint of `step`, in the background.

        Waits for the save before it. Does nothing when `step` is the one saved or restored last.
        The arrays of `state` may be donated or deleted as soon as this returns.

        Args:
            step: the number of optimizer steps taken; the checkpoint's name.
            state: a tree of jax.Arrays; their global values are stored, so that they can be
                restored onto another mesh.
            metadata: other facts for a resumed run, as JSON; "model" holds the model's config.

        Raises:
            RunError: too many saves in a row have failed.
            UserError: `folder` already holds this step or a later one.
        """
        started = time.monotonic()
        self.wait()
        if step == self._newest_step:
            return
        self._start_saving(step, state, metadata)
        self._last_save = time.monotonic()
        seconds = self._last_save - started
        self.blocked_seconds += seconds
        self._report(f"step {step}: training waited {seconds:.2f} s for the checkpoint's copy")

    def _start_saving(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        problem = None
        try:
            if self._first_process:
                self._make_room()
        except OSError as error:
            problem = _reason(error)
        later = number_of_first_process(max(self.latest_steps(), default=-1))
        if later >= step:
            raise UserError(
                f"{self.folder}: already holds a checkpoint of step {later}, so step {step} cannot "
                "be added; resume from it or use another run directory"
            )
        if problem := first_text(problem):
            self._saving = _Save(step, _failed(OSError(problem)))
            return
        arrays = _by_name(state)
        content = {
            "step": step,
            "metadata": json.loads(json.dumps(dict(metadata))),
            "arrays": describe_arrays(arrays),
        }
        try:
            self._orbax.save(self.folder / str(step), args=SaveState(arrays, content=content))
        except (OSError, ValueError) as error:
            self._saving = _Save(step, _failed(error))
        else:
            self._saving = _Save(step, self._background.submit(self._finish))

    def wait(self) -> bool:
        """Wait until the save in the background, if there is one, is committed.

        Returns:
            False if it failed, which `report` has said.

        Raises:
            RunError: too many saves in a row have failed.
            LostContactError: another process is gone.
        """
        if self._saving is None:
            return True
        (step, finished), self._saving = self._saving, None
        problem = None
        try:
            finished.result()
        except Exception as error:
            for reason in (error, error.__cause__):
                if isinstance(reason, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                    with translate_collective_errors():
                        raise reason from None
            problem = _reason(error)
        if problem := first_text(problem):
            self._save_failed(step, problem)
            return False
        self._newest_step, self._failures_in_a_row = step, 0
        return True

    @property
    def retry_pause(self) -> float:
        """Seconds that should pass between the last save, which failed, and the next."""
        return _pause_after(self._failures_in_a_row)

    def restore(
        self,
        abstract_state: State,
        *,
        model: Mapping[str, Any] | None = None,
        adapt: Callable[[State, Mapping[str, str]], State] | None = None,
    ) -> tuple[State, dict[str, Any]]:
        """Read the state and the metadata of the newest checkpoint that is undamaged.

        A damaged checkpoint is left where it is, one line of `report` names it, and the one before
        it is read.

        Args:
            abstract_state: a tree of jax.ShapeDtypeStructs with shardings, on any mesh.
            model: the model's config; None to restore without looking at the model.
            adapt: function that replaces `abstract_state`, called with it and the saved arrays'
                types by name, as "float32[100,64]". None: `abstract_state` stays.

        Returns:
            the state, with the shardings of `abstract_state`, and the metadata given to `save`
            together with "step".

        Raises:
            UserError: there is no checkpoint, all are damaged, or it is of another model or holds
                other arrays (found before any array is read).
        """
        self.wait()
        problems: dict[int, str] = {}
        steps = self.latest_steps()
        while (step := number_of_first_process(steps.pop(0) if steps else -1)) >= 0:
            try:
                state, content = self._read(step, abstract_state, model, adapt)
            except manifest.DamagedCheckpoint as damage:
                problems[step] = str(damage)
                continue
            self._newest_step, self._damaged_steps = step, list(problems)
            self._tell(problems, step)
            return state, {**content["metadata"], "step": content["step"]}
        if not problems:
            raise UserError(f"{self.folder}: holds no checkpoint")
        raise UserError(f"{self.folder}: holds no undamaged checkpoint: {_list_of(problems)}")

    def close(self) -> None:
        """Wait for the save in the background, whatever becomes of it, and stop the threads.

        Unlike `wait` it asks no other process, so that one that fails alone can call it.
        """
        if self._saving is not None and (error := self._saving.finished.exception()) is not None:
            self._report(self._not_saved(self._saving.step, _reason(error)))
        self._background.shutdown()
        self._orbax.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not isinstance(error, LostContactError):  # what is being saved waits for that process
            self.close()

    def _open_folder(self) -> None:
        problem = None
        try:
            if self._first_process:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"cannot hold checkpoints ({error.strerror})"
        if problem := first_text(problem):
            raise UserError(f"{self.folder}: {problem}")
        if jax.process_count() > 1:
            self._require_shared_folder()

    def _require_shared_folder(self) -> None:
        """Check that every process finds a file that process 0 has just written to the folder.

        Otherwise Orbax would wait for the others' files until it times out, or write only some.
        """
        token = first_text(uuid.uuid4().hex if self._first_process else None)
        marker = self.folder / f".shared-{token}"
        problem = None
        try:
            if self._first_process:
                marker.touch()
        except OSError as error:
            problem = f"cannot be written to ({error.strerror})"
        if problem := first_text(problem):
            raise UserError(f"{self.folder}: {problem}")
        if not marker.exists():
            problem = (
                f"process {jax.process_index()} does not see what process 0 writes there; "
                "checkpoints need a file system that all processes share"
            )
        problem = first_text(problem)
        if self._first_process:
            marker.unlink()
        if problem:
            raise UserError(f"{self.folder}: {problem}")

    def _make_room(self) -> None:
        """Set damaged checkpoints aside and remove half-written ones, before a save."""
        for step in self._damaged_steps:
            target = set_aside(self.folder, step)
            self._report(f"{self.folder / str(step)}: damaged; renamed to {target.name}")
        self._damaged_steps = []
        for step in interrupted_steps(self.folder):
            self._report(f"{self.folder}: removed the interrupted save of step {step}")
        remove_leftovers(self.folder)

    def _finish(self) -> None:
        self._orbax.wait_until_finished()
        if self._first_process:
            remove_old(self.folder, self._keep)

    def _save_failed(self, step: int, problem: str) -> None:
        """Warn of a failed save, or end the run if it is one too many."""
        self._failures_in_a_row += 1
        self.failed_saves += 1
        message = self._not_saved(step, problem)
        if self._failures_in_a_row > len(RETRY_SECONDS):
            raise RunError(
                f"{message}; that is the save number {self._failures_in_a_row} in a row that "
                "failed. Start the run again when it can write there: it goes on from its newest "
                "checkpoint"
            )
        self._report(f"warning: {message}; the run goes on, and saves again soon")

    def _not_saved(self, step: int, problem: str) -> str:
        return f"{self.folder}: step {step} could not be saved: {problem}"

    def _read(
        self,
        step: int,
        abstract_state: State,
        model: Mapping[str, Any] | None,
        adapt: Callable[[State, Mapping[str, str]], State] | None,
    ) -> tuple[State, dict[str, Any]]:
        """Read the state of the checkpoint of `step`, and its manifest.

        Raises:
            DamagedCheckpoint: on every process, if any of them finds it damaged.
        """
        path = self.folder / str(step)
        content = _together(lambda: manifest.read(path))
        if model is not None:
            refuse_other_model(path, content["metadata"].get("model"), model)
        if adapt is not None:
            abstract_state = adapt(abstract_state, content["arrays"])
        wanted = _by_name(abstract_state)
        refuse_other_arrays(path, content["arrays"], wanted)
        process, processes = jax.process_index(), jax.process_count()
        _together(
            lambda: manifest.verify(path, content["files"], process=process, processes=processes)
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        arguments = RestoreState(wanted, restore_args=restore_args)
        arrays = _together(lambda: self._orbax.restore(path, args=arguments))
        leaves = [arrays[name] for name in wanted]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), content

    def _tell(self, problems: dict[int, str], restored: int) -> None:
        problems = dict(problems)
        for step in interrupted_steps(self.folder):
            if step > restored:
                problems.setdefault(step, "its save was interrupted")
        if problems:
            self._report(f"{self.folder}: {_list_of(problems)}; restoring step {restored} instead")


def _pause_after(failures: int) -> float:
    """Return the seconds to wait after `failures` in a row."""
    return RETRY_SECONDS[min(max(failures, 1), len(RETRY_SECONDS)) - 1]


def _failed(error: Exception) -> "Future[None]":
    """Return a future that has failed with `error`."""
    future: Future[None] = Future()
    future.set_exception(error)
    return future


def _reason(error: BaseException) -> str:
    """Return the reason of a failed write in one line."""
    reason = getattr(error, "strerror", None)
    return reason or first_line(error)


def _together(read: Callable[[], Result]) -> Result:
    """Call `read`; raise DamagedCheckpoint on every process if it fails on any."""
    result, problem = None, None
    try:
        result = read()
    except (manifest.DamagedCheckpoint, OSError, ValueError) as error:
        problem = first_line(error)
    if problem := first_text(problem):
        raise manifest.DamagedCheckpoint(problem)
    return cast(Result, result)


def _list_of(problems: dict[int, str]) -> str:
    newest_first = sorted(problems.items(), reverse=True)
    return ", ".join(f"step {step} is not whole ({problem})" for step, problem in newest_first)


def _by_name(state: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, as "parameters.layers.query", in the tree's order."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of the state have the same path"
    return named


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    """Filter out the error of a save that Orbax logs with a stack trace, since `wait` raises it."""
    return not (record.exc_info and "orbax" in record.pathname)
