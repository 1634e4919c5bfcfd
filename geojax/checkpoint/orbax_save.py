"""A save of one group of processes by Orbax, and its manifest."""

import contextlib
import dataclasses
import functools
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from geojax.checkpoint import manifest
from geojax.checkpoint.failed_write import reason
from geojax.checkpoint.site_group import SiteGroup


class OrbaxSave:
    """Saves of one group of processes, one after the other."""

    def __init__(self, group: SiteGroup):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_not_raised_too)
        _hide_writes_after_a_failed_one()
        processes = ocp.options.MultiprocessingOptions(
            primary_host=group.primary,
            active_processes=set(group.processes),
            # Sites that save at once meet at barriers of their own.
            barrier_sync_key_prefix=group.name or None,
        )
        self._handler = _SiteHandler(group, processes)
        self._orbax = ocp.AsyncCheckpointer(
            self._handler,
            multiprocessing_options=processes,
            # The signal that a folder is there has one name in the whole job: a site that has
            # saved would remove that of one which has not, and leave it waiting.
            async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            temporary_path_class=_SavedFolders(self._handler),
        )

    def begin(self, folder: Path, arrays: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Copy `arrays` off the devices and begin to write them, with a manifest of `content`.

        Raises:
            OSError: the folder cannot be written to.
            ValueError: it is there.
        """
        self._handler.content, self._handler.problem = content, None
        with self._without_later_errors():
            self._orbax.save(folder, args=SaveArrays(dict(arrays)))

    def finish(self) -> None:
        """Wait until the save is there.

        Raises:
            OSError: it could not be written.
        """
        with self._without_later_errors():
            self._orbax.wait_until_finished()
        if self._handler.problem is not None:
            raise OSError(self._handler.problem)

    @contextlib.contextmanager
    def _without_later_errors(self) -> Iterator[None]:
        """Let a save fail once: Orbax keeps the errors of all its writes, and raises one a save."""
        try:
            yield
        except (OSError, ValueError):
            while True:
                with contextlib.suppress(OSError, ValueError):
                    self._orbax.wait_until_finished()
                    break
            raise

    def close(self) -> None:
        """Wait for what is being written, and stop the threads."""
        self._orbax.close()


class _SiteHandler(ocp.PyTreeCheckpointHandler):
    """Handler that saves a dict of arrays and, last before the atomic rename, its manifest.

    A process that cannot write keeps the problem instead of raising an error: the others would wait
    for it at Orbax's barriers until they time out. It lacks in the checksums then, and the primary
    process writes no manifest, without which there is no checkpoint.
    """

    def __init__(self, group: SiteGroup, processes: ocp.options.MultiprocessingOptions) -> None:
        # Compression takes 8% off float32 weights and made a save of 0.5 GB four times longer.
        arrays = _SiteArrays(primary_host=group.primary, enable_write_sharding_file=False)
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        super().__init__(
            use_compression=False, multiprocessing_options=processes, type_handler_registry=registry
        )
        self._group = group
        self.content: Mapping[str, Any] = {}
        self.problem: str | None = None
        """The reason why this process could not save."""

    @contextlib.contextmanager
    def keeping_problems(self) -> Iterator[None]:
        """Keep the first problem of the writes inside."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.problem = self.problem or reason(error)

    async def async_save(
        self,
        directory: Any,
        item: Any = None,
        save_args: Any = None,
        args: Any = None,
    ) -> list[Any]:
        """Copy the arrays off the devices; waiting for the returned futures finishes the save."""
        writes = None
        with self.keeping_problems():
            writes = await super().async_save(directory, args=args)
        return [_WritesThenChecksums(self, writes or [], Path(directory))]

    def finalize(self, directory: Any) -> None:
        """Join the files of all processes and write the manifest; runs on the primary only."""
        with self.keeping_problems():
            parts = manifest.read_parts(Path(directory), self._group.processes)
            super().finalize(directory)
            manifest.write(Path(directory), self.content, parts)


class _SavedFolders:
    """Makes the temporary folder of each save; Orbax takes it for the class of these."""

    def __init__(self, handler: _SiteHandler) -> None:
        self._handler = handler

    def from_final(self, *args: Any, **options: Any) -> "_SavedFolder":
        """Return the one that is renamed to a given folder."""
        folder = _SavedFolder.from_final(*args, **options)
        folder.handler = self._handler
        return folder


class _SavedFolder(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """The temporary folder of a save, whose problems the handler keeps."""

    handler: _SiteHandler

    async def create(self) -> Any:
        """Make it; on the primary process only."""
        with self.handler.keeping_problems():
            await super().create()
        return self.get()

    async def finalize(self) -> None:
        """Rename it, if all has been written; on the primary process only."""
        with self.handler.keeping_problems():
            if self.handler.problem is None:
                await super().finalize()


class _SiteArrays(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of arrays, for arrays of a site in a job of several.

    Orbax's own writes what process 0 has to write, and takes an array that lies in one process
    alone for a mistake.
    """

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Write this process's part of the arrays."""
        whole = [_OwnArray(value) if value.is_fully_addressable else value for value in values]
        return await super().serialize(whole, infos, args)


class _OwnArray:
    """An array that lies in one process, and says so."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)


@ocp.args.register_with_handler(_SiteHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class SaveArrays(ocp.args.PyTreeSave):
    """Arguments of a save: `item`, a dict of arrays. Orbax asks for some of a restore too."""


class _WritesThenChecksums:
    """Future of a save in this process, which writes its files and then checksums them.

    Orbax calls `result` in its background thread, on every process, before the processes meet to
    commit the checkpoint.
    """

    def __init__(self, handler: _SiteHandler, writes: Sequence[Any], directory: Path) -> None:
        self._handler = handler
        self._writes = writes
        self._directory = directory

    def result(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._handler.keeping_problems():
            for write in self._writes:
                write.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._handler.problem is None:
                manifest.write_part(self._directory, jax.process_index())


@functools.cache
def _hide_writes_after_a_failed_one() -> None:
    """Hide the stack traces of writes that end when Orbax has given up, since one had failed.

    TensorStore then calls back into an event loop that is closed, hundreds of times.
    """
    show = sys.unraisablehook

    def show_others(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = show_others


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    """Filter out the error of a save that is logged with a stack trace, since it is reported."""
    never_retrieved = str(record.msg).startswith("_GatheringFuture exception was never")
    return not (record.exc_info and ("orbax" in record.pathname or never_retrieved))
