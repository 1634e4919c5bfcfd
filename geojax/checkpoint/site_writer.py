"""The folder of checkpoints of one group of processes, written in the background."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from geojax.checkpoint.folder import (
    committed_steps,
    interrupted_steps,
    remove,
    remove_leftovers,
    remove_old,
    set_aside,
)
from geojax.checkpoint.site_group import SiteGroup


class SiteWriter:
    """The folder of one group of processes, `folder/<step>`, and what is being written into it.

    Every process of the group calls every method that does not say otherwise.
    """

    def __init__(self, group: SiteGroup, folder: Path, keep: int, report: Callable[[str], None]):
        """Write into `folder`, which exists; `report` is called on the group's primary process."""
        self.group, self.folder = group, folder
        self._keep = keep
        self._report = report if group.is_primary_here else lambda line: None
        # Imported here: Orbax takes a fifth of a second, and most commands save nothing.
        from geojax.checkpoint.orbax_save import OrbaxSave

        self._orbax = OrbaxSave(group)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def make_room(
        self, unusable: Sequence[int], damaged: Collection[Path], failed: Sequence[int]
    ) -> None:
        """Prepare the folder for a save, on the primary process alone.

        Args:
            unusable: steps to set aside: damaged, or not saved by all sites.
            damaged: the parts of them that are damaged themselves.
            failed: steps to remove: another site could not save them.

        Raises:
            OSError: the folder cannot be written to.
        """
        # Behind the removal of old checkpoints, if that still goes on.
        self._background.submit(self._make_room, unusable, damaged, failed).result()

    def _make_room(
        self, unusable: Sequence[int], damaged: Collection[Path], failed: Sequence[int]
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        committed = committed_steps(self.folder)
        for step in set(unusable).intersection(committed):
            part = self.folder / str(step)
            is_damaged = part in damaged
            why = "damaged" if is_damaged else "whole, but not all sites have theirs"
            target = set_aside(self.folder, step, damaged=is_damaged)
            self._report(f"{part}: {why}; renamed to {target.name}")
        for step in set(failed).intersection(committed):
            remove(self.folder, step)
        for step in interrupted_steps(self.folder):
            self._report(f"{self.folder}: removed the interrupted save of step {step}")
        remove_leftovers(self.folder)
        probe = self.folder / ".writable"
        probe.write_bytes(b"0")
        probe.unlink()

    def save(
        self, step: int, arrays: Mapping[str, Any], content: Mapping[str, Any]
    ) -> "Future[None]":
        """Copy `arrays` off the devices and write them in the background, with a manifest."""
        finished: Future[None] = Future()
        try:
            self._orbax.begin(self.folder / str(step), arrays, content)
        except (OSError, ValueError) as error:
            finished.set_exception(error)
            return finished
        return self._background.submit(self._orbax.finish)

    def remove_old(self) -> None:
        """Remove all but the newest checkpoints, in the background, once all sites have saved."""
        if self.group.is_primary_here:
            self._background.submit(self._remove_old)

    def close(self) -> None:
        """Wait for what is being written, and stop the threads."""
        self._background.shutdown()
        self._orbax.close()

    def _remove_old(self) -> None:
        with contextlib.suppress(OSError):  # the next save meets it again, and reports it
            remove_old(self.folder, self._keep)
