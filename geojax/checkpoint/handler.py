"""Orbax's handler of array trees, with a manifest written before the checkpoint is committed."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from geojax.checkpoint import manifest


class StateHandler(ocp.PyTreeCheckpointHandler):
    """Handler that saves a tree of arrays and, last before the atomic rename, its manifest."""

    def __init__(self) -> None:
        # Compression takes 8% off float32 weights and made a save of 0.5 GB four times longer.
        super().__init__(use_compression=False)
        self._content: dict[str, Any] = {}

    async def async_save(
        self,
        directory: Any,
        item: Any = None,
        save_args: Any = None,
        args: Any = None,
    ) -> list[Any]:
        """Copy the arrays off the devices; waiting for the returned futures finishes the save."""
        assert isinstance(args, SaveState), "StateHandler must be called with SaveState arguments"
        self._content = args.content
        writes = await super().async_save(directory, args=args)
        return [_WritesThenChecksums(writes or [], Path(directory))]

    def finalize(self, directory: Any) -> None:
        """Join the files of all processes and write the manifest; runs on process 0 only."""
        super().finalize(directory)
        manifest.write(Path(directory), self._content, processes=jax.process_count())


@ocp.args.register_with_handler(StateHandler, for_save=True)
@dataclasses.dataclass
class SaveState(ocp.args.PyTreeSave):
    """Arguments of a save: `item`, a dict of arrays, and `content` for the manifest."""

    content: dict[str, Any] = dataclasses.field(default_factory=dict)


@ocp.args.register_with_handler(StateHandler, for_restore=True)
@dataclasses.dataclass
class RestoreState(ocp.args.PyTreeRestore):
    """Arguments of a restore: `item` and `restore_args` as in `PyTreeRestore`."""


class _WritesThenChecksums:
    """Future of a save in this process, which writes its files and then checksums them.

    Orbax calls `result` in its background thread, on every process, before the processes meet to
    commit the checkpoint.
    """

    def __init__(self, writes: Sequence[Any], directory: Path) -> None:
        self._writes = writes
        self._directory = directory

    def result(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for write in self._writes:
            write.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        manifest.write_part(self._directory, jax.process_index())
