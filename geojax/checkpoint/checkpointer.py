"""The checkpointer: saves the training state in the background, restores it onto any layout."""

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.errors
from jax.sharding import Mesh

from geojax.checkpoint.agreement import first_text
from geojax.checkpoint.failed_write import reason
from geojax.checkpoint.folder import committed_steps
from geojax.checkpoint.reading.common_save import SavesOfSites
from geojax.checkpoint.reading.restorer import Restorer
from geojax.checkpoint.saved_array import SavedArray
from geojax.checkpoint.site_folders import open_site_folders
from geojax.checkpoint.site_group import SiteGroup, site_groups
from geojax.checkpoint.site_writer import SiteWriter
from geojax.errors import LostContactError, RunError, UserError
from geojax.named_arrays import describe_arrays, leaves_by_name, leaves_of_parts
from geojax.runtime import translate_collective_errors
from geojax.sharding.leaf_layouts import LeafLayout

_logger = logging.getLogger(__name__)

RETRY_SECONDS = (1.0, 10.0, 60.0, 120.0)
"""Seconds from the first, second, ... failed save in a row to the next; one more ends the run."""


class _Save(NamedTuple):
    """A save that goes on in the background."""

    step: int
    finished: "Sequence[Future[None]]"
    """One of each site that this process belongs to."""

    @property
    def has_failed(self) -> bool:
        """True if this process has seen that it failed."""
        return any(each.done() and each.exception() is not None for each in self.finished)


class Checkpointer:
    """The checkpoints of one run, the newest `keep` of them.

    With several sites each writes what its devices hold into a folder of its own,
    `folder/<site>/<step>`, and reads it from there: the processes of a site share a file system,
    and sites need not. Otherwise they lie in `folder/<step>`.

    `save` returns when the arrays have been copied off the devices; writing, checksums, the commit
    and the removal of old checkpoints go on in the background. A checkpoint is committed by one
    rename and carries the checksums of its files, so a process killed at any moment leaves the
    checkpoints before it whole, and damage done later is found.

    A save that fails (a full disk, a file system that is away for a while) is a warning; `due` asks
    for the next one after a pause. When too many in a row have failed, the run ends.

    With several processes of one JAX runtime every process calls every method.
    """

    def __init__(
        self,
        folder: Path,
        mesh: Mesh,
        *,
        sites: Sequence[str] | None = None,
        island: str | None = None,
        saves_of_sites: SavesOfSites | None = None,
        keep: int = 3,
        interval: int | None = None,
        interval_minutes: float | None = None,
        link_bytes_per_second: float | None = None,
        report: Callable[[str], None] = _logger.warning,
    ) -> None:
        """Open `folder`, which is made if needed.

        Args:
            folder: folder of the checkpoints.
            mesh: mesh of the run.
            sites: names of the sites along `dc`, each of which saves by itself; None: all save
                together, on a file system that all processes share.
            island: the one of `sites` that `mesh` is of, where each has a JAX runtime of its own
                and a part of the state; None: the mesh is of all sites.
            saves_of_sites: exchange of islands, which all restore one save; None: each restores
                its own newest.
            keep: number of checkpoints to keep.
            interval: `should_save` is true for multiples of this step number.
            interval_minutes: `due` is true when the last save is at least this long ago.
            link_bytes_per_second: bandwidth between sites, of which a restore onto another layout
                tells how long it takes.
            report: called with a line about saves and damaged checkpoints, on process 0 only.

        Raises:
            UserError: a folder cannot be made or is in use, or a process does not see what the
                first process of its site writes.
        """
        assert keep >= 1, f"keep must be at least 1, not {keep}"
        # TensorStore writes to a path with .., and refuses to read from it.
        self.folder = Path(folder).resolve()
        self._interval = interval
        self._interval_minutes = interval_minutes
        self._report = report if jax.process_index() == 0 else lambda line: None
        self._groups = site_groups(mesh, sites, island)
        self._sites = [group.name for group in self._groups]
        if island is not None and sites is not None:
            self._sites = list(sites)
        self._locks = open_site_folders(self.folder, self._groups)
        elsewhere = [] if island is None else [site for site in self._sites if site != island]
        self._restorer = Restorer(
            self.folder,
            self._groups,
            elsewhere,
            saves_of_sites,
            link_bytes_per_second,
            self._report,
        )
        self._writers = [
            SiteWriter(group, group.folder(self.folder), keep, report)
            for group in self._groups
            if group.is_here
        ]
        self.run = first_text(uuid.uuid4().hex) or ""
        """Name of the run in its checkpoints. Islands agree on one before the first save."""
        self.membership_id = 0
        """Newest record of who takes part, which the next save or the restored one is under."""
        self._last_save = time.monotonic()
        self._newest_step: int | None = None
        self._unusable_steps: list[int] = []
        self._damaged_parts: list[Path] = []
        self._failed_steps: list[int] = []
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

    def save(
        self,
        step: int,
        state: Any,
        layouts: Any,
        metadata: Mapping[str, Any],
        parts: Sequence[Any] = (),
    ) -> None:
        """Save `state` as the checkpoint of `step`, in the background.

        Waits for the save before it. Does nothing when `step` is the one saved or restored last.
        The arrays of `state` may be donated or deleted as soon as this returns.

        Args:
            step: the number of optimizer steps taken; the checkpoint's name.
            state: a tree of jax.Arrays on the mesh.
            layouts: the `LeafLayout` of each of them.
            metadata: other facts for a resumed run, as JSON; "model" holds the model's config.
            parts: the `layouts` of all sites, where this one is an island; () where it is not.

        Raises:
            RunError: too many saves in a row have failed.
            UserError: a folder already holds this step or a later one.
        """
        started = time.monotonic()
        self.wait()
        if step == self._newest_step:
            return
        if self._make_room(step):
            leaves, named = leaves_by_name(state), leaves_by_name(layouts)
            content = self._content(step, named, metadata, parts)
            finished = [
                writer.save(step, *self._part(writer, leaves, named, content))
                for writer in self._writers
            ]
            self._saving = _Save(step, finished)
        self._last_save = time.monotonic()
        seconds = self._last_save - started
        self.blocked_seconds += seconds
        self._report(f"step {step}: training waited {seconds:.2f} s for the checkpoint's copy")

    def wait(self) -> bool:
        """Wait until the save in the background, if there is one, is committed at all sites.

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
        for each in finished:
            if (error := each.exception()) is not None:
                for cause in (error, error.__cause__):
                    if isinstance(cause, jax.errors.JaxRuntimeError) and jax.process_count() > 1:
                        with translate_collective_errors():
                            raise cause from None
                problem = reason(error)
        if problem := first_text(problem):
            self._save_failed(step, problem)
            return False
        self._newest_step, self._failures_in_a_row = step, 0
        for writer in self._writers:
            writer.remove_old()
        return True

    @property
    def retry_pause(self) -> float:
        """Seconds that should pass between the last save, which failed, and the next."""
        return _pause_after(self._failures_in_a_row)

    def newest(self) -> dict[str, Any] | None:
        """Return the metadata of the checkpoint that all sites would restore, with "step".

        Its arrays may turn out to be damaged at the restore, which then takes an older checkpoint.

        Returns:
            None where no site has a checkpoint.

        Raises:
            UserError: there are checkpoints, and none is whole at all sites.
            RunError: another island is lost.
        """
        return self._restorer.newest()

    def restore(
        self,
        layouts: Any,
        *,
        model: Mapping[str, Any] | None = None,
        adapt: Callable[[Any, Mapping[str, str]], Any] | None = None,
        parts: Sequence[Any] = (),
    ) -> tuple[Any, dict[str, Any]]:
        """Read the state and the metadata of the newest checkpoint that is undamaged.

        A damaged checkpoint is left where it is, one line of `report` names it, and the one before
        it is read.

        Args:
            layouts: a tree of `LeafLayout`s on the mesh.
            model: the model's config; None to restore without looking at the model.
            adapt: function that replaces `layouts`, called with them and the saved arrays' types by
                name, as "float32[100,64]". None: `layouts` stay.
            parts: see `save`.

        Returns:
            the state, laid out as `layouts`, and the metadata given to `save` together with "step".

        Raises:
            UserError: there is no checkpoint, all are damaged, or it is of another model or holds
                other arrays (found before any array is read).
        """
        self.wait()
        restored = self._restorer.restore(layouts, model=model, adapt=adapt, parts=parts)
        self._newest_step = int(restored.metadata["step"])
        self.membership_id = restored.membership_id
        self._unusable_steps = list(restored.unusable)
        self._damaged_parts = [self.folder / path for path in restored.damaged]
        return restored.state, restored.metadata

    def close(self) -> None:
        """Wait for the save in the background, whatever becomes of it, and stop the threads.

        Unlike `wait` it asks no other process, so that one that fails alone can call it.
        """
        for writer in self._writers:
            writer.close()
        if self._saving is not None:
            for each in self._saving.finished:
                if (error := each.exception()) is not None:
                    self._report(self._not_saved(self._saving.step, reason(error)))
        for lock in self._locks:
            lock.release()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.wait()
        if not isinstance(error, LostContactError):  # what is being saved waits for that process
            self.close()

    def _make_room(self, step: int) -> bool:
        """Prepare all folders for a save; return whether it can begin.

        Raises:
            UserError: a folder holds a step that is not before this one.
        """
        problem = later = None
        for writer in self._writers:
            if writer.group.is_primary_here:
                try:
                    writer.make_room(self._unusable_steps, self._damaged_parts, self._failed_steps)
                    newest = max(committed_steps(writer.folder), default=-1)
                except OSError as error:
                    problem = reason(error)
                    continue
                if newest >= step:
                    later = (
                        f"{writer.folder}: already holds a checkpoint of step {newest}, so step "
                        f"{step} cannot be added; resume from it or use another run directory"
                    )
        if later := first_text(later):
            raise UserError(later)
        if problem := first_text(problem):
            failed: Future[None] = Future()
            failed.set_exception(OSError(problem))
            self._saving = _Save(step, [failed])
            return False
        self._unusable_steps, self._failed_steps = [], []
        return True

    def _content(
        self,
        step: int,
        layouts: Mapping[str, LeafLayout],
        metadata: Mapping[str, Any],
        parts: Sequence[Any],
    ) -> dict[str, Any]:
        """Return what the manifests of all sites' parts say."""

        def held_by(layouts: Mapping[str, LeafLayout], group: SiteGroup) -> dict[str, Any]:
            return {
                name: array.dims
                for name, layout in layouts.items()
                if (array := SavedArray.of_site(layout, group.all_sites, group.site)) is not None
            }

        if parts:
            held = [held_by(leaves_by_name(part), self._groups[0]) for part in parts]
        else:
            held = [held_by(layouts, group) for group in self._groups]
        return {
            "step": step,
            "run": self.run,
            "membership_id": self.membership_id,
            "metadata": dict(metadata),
            "arrays": describe_arrays(leaves_of_parts(parts) or layouts),
            "sites": self._sites,
            "held": held,
        }

    def _part(
        self,
        writer: SiteWriter,
        leaves: Mapping[str, jax.Array],
        layouts: Mapping[str, LeafLayout],
        content: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arrays that a site saves, and its manifest."""
        arrays = {
            name: array
            for name, leaf in leaves.items()
            if (array := writer.group.array(leaf, layouts[name])) is not None
        }
        return arrays, json.loads(
            json.dumps({**content, "site": self._sites.index(writer.group.name)})
        )

    def _save_failed(self, step: int, problem: str) -> None:
        """Warn of a failed save, or end the run if it is one too many."""
        self._failures_in_a_row += 1
        self.failed_saves += 1
        self._failed_steps.append(step)
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


def _pause_after(failures: int) -> float:
    """Return the seconds to wait after `failures` in a row."""
    return RETRY_SECONDS[min(max(failures, 1), len(RETRY_SECONDS)) - 1]
