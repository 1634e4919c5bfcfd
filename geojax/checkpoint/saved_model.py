"""The weights of a saved run, block by block, on one host without devices."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from geojax.checkpoint import manifest
from geojax.checkpoint.choice import Part, list_parts, saved_arrays
from geojax.checkpoint.saved_array import Indices, open_array
from geojax.errors import UserError
from geojax.optim.layout import PADDING


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """The parts of one save that together hold the whole model."""

    checkpoints: Path
    """Folder of the run's checkpoints."""
    step: int
    """Step of the save."""
    content: Mapping[str, Any]
    """Manifest of any part."""
    parts: Sequence[Part]
    """Parts to read."""

    @classmethod
    def open(cls, run: Path, step: int | None = None) -> "SavedModel":
        """Choose the newest save of a run, or the one of `step`.

        Args:
            run: directory of the run.
            step: the step; None: the newest.

        Raises:
            UserError: there is none, or the folder of a site is missing or damaged.
        """
        checkpoints = run / "checkpoints"
        parts = list_parts(checkpoints, checkpoints)
        parts = [part for part in parts if step in (None, part.step)]
        if not parts:
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise UserError(f"{run}: holds no {wanted}")
        newest = max(part.step for part in parts)
        parts = [part for part in parts if part.step == newest]
        where = f"{checkpoints}: step {newest}"
        if damaged := [part for part in parts if part.problem]:
            raise UserError(f"{where} is damaged: {damaged[0].path}: {damaged[0].problem}")
        if len({part.run for part in parts}) > 1:
            raise UserError(f"{where} was saved by two runs; move the folders of one of them away")
        whole = [part for part in parts if part.has_all][:1]
        sites = parts[0].sites
        missing = [site for index, site in enumerate(sites) if index not in _numbers(parts)]
        if missing and not whole:
            raise UserError(
                f"{where} lacks the part of site {' and '.join(missing)}; copy that site's folder "
                f"beside {parts[0].path}"
            )
        content = manifest.read(checkpoints / parts[0].path)
        return cls(checkpoints, newest, content, whole or parts)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata given to the save."""
        metadata: Mapping[str, Any] = self.content["metadata"]
        return metadata

    def verify(self) -> None:
        """Compare all files of the save with their checksums.

        Raises:
            UserError: one is damaged.
        """
        for part in self.parts:
            path = self.checkpoints / part.path
            try:
                manifest.verify(path, manifest.read(path)["files"])
            except manifest.DamagedCheckpoint as damage:
                raise UserError(f"{path}: is damaged: {damage}") from None

    def blocks(self, name: str) -> Iterator[tuple[Indices, np.ndarray]]:
        """Yield the leaf `name` of the state in the blocks that it was written in, each read once.

        A block is its indices in the model's leaf along each dim, and its values. Sites may have
        elements in common.
        """
        for part in self.parts:
            array = saved_arrays(self.content, part.site).get(name)
            if array is None:
                continue
            store = open_array(self.checkpoints / part.path, name).result()
            indices = array.indices(store.shape)
            size = store.chunk_layout.read_chunk.shape
            starts = (
                range(0, length, step) for length, step in zip(store.shape, size, strict=True)
            )
            for start in itertools.product(*starts):
                block = tuple(slice(at, at + step) for at, step in zip(start, size, strict=True))
                wanted = tuple(dim[at] for dim, at in zip(indices, block, strict=True))
                held = tuple(np.flatnonzero(dim != PADDING) for dim in wanted)
                if all(positions.size for positions in held):
                    values = store[block].read().result()[np.ix_(*held)]
                    yield tuple(d[at] for d, at in zip(wanted, held, strict=True)), values


def _slices(length: int, size: int) -> list[slice]:
    """Divide a dim into blocks of `size`, of which the last may be shorter."""
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def _numbers(parts: Sequence[Part]) -> set[int]:
    return {part.site for part in parts}
