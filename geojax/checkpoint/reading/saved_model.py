"""The weights of a saved run: on the devices of any mesh, or block by block without devices."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from geojax.checkpoint import manifest
from geojax.checkpoint.reading.choice import SavedPart, list_parts, saved_arrays
from geojax.checkpoint.reading.saved_state import SavedState
from geojax.checkpoint.saved_array import Indices, open_array
from geojax.checkpoint.site_group import site_groups
from geojax.errors import UserError
from geojax.named_arrays import leaves_by_name
from geojax.optim.averages import AVERAGE
from geojax.paths import resolved_path
from geojax.run_paths import CHECKPOINTS
from geojax.sharding.leaf_layouts import PADDING


@dataclasses.dataclass(frozen=True)
class SavedModel:
    """The parts of one save that together hold the whole model."""

    checkpoints: Path
    """Folder of the run's checkpoints."""
    step: int
    """Step of the save."""
    content: Mapping[str, Any]
    """Manifest of any part."""
    parts: Sequence[SavedPart]
    """Parts to read."""

    @classmethod
    def open(
        cls, run: Path, step: int | None = None, log: Callable[[str], None] = print
    ) -> "SavedModel":
        """Choose the newest save of a run that is whole, or the one of `step`.

        Nothing is locked: the run may go on, and save the next step meanwhile.

        Args:
            run: directory of the run.
            step: the step; None: the newest.
            log: told which newer steps are not whole.

        Raises:
            UserError: there is none, or the folder of a site is missing or damaged.
        """
        checkpoints = resolved_path(run / CHECKPOINTS)
        parts = list_parts(checkpoints, checkpoints)
        steps = sorted({part.step for part in parts if step in (None, part.step)}, reverse=True)
        if not steps:
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise UserError(f"{run}: holds no {wanted}")
        problems: list[str] = []
        for each in steps:
            of_step = [part for part in parts if part.step == each]
            problem = _problem(checkpoints, of_step) or _unreadable(checkpoints, of_step)
            if problem is None:
                for line in problems:
                    log(f"{line}; reading step {each}")
                whole = [part for part in of_step if part.has_all][:1]
                content = manifest.read(checkpoints / of_step[0].path)
                return cls(checkpoints, each, content, whole or of_step)
            problems.append(problem)
        raise UserError(problems[0])

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata given to the save."""
        metadata: Mapping[str, Any] = self.content["metadata"]
        return metadata

    @property
    def is_removed(self) -> bool:
        """True if a part of the save has been removed since it was opened."""
        return not all((self.checkpoints / part.path).exists() for part in self.parts)

    @property
    def weights(self) -> str:
        """Name of the tree of weights to evaluate and export, a prefix of its leaves' names.

        It is the average that the optimizer keeps, if it keeps one, and else the parameters.
        """
        names = (name for part in self.parts for name in saved_arrays(self.content, part.site))
        averages = (name.partition(f".{AVERAGE}.") for name in names)
        found = next((prefix for prefix, average, _ in averages if average), None)
        return "parameters" if found is None else f"{found}.{AVERAGE}"

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

    def read(self, layouts: Any, mesh: Mesh) -> Any:
        """Read `weights` onto a mesh, of which each process reads what its devices hold.

        Args:
            layouts: a tree of `LeafLayout`s of parameters, which also say the dtype.
            mesh: the mesh of the layouts.
        """
        state = SavedState(self.checkpoints, self.content, [self.parts], site_groups(mesh, None))
        leaves = [
            state.read(f"{self.weights}.{name}", layout)
            for name, layout in leaves_by_name(layouts).items()
        ]
        return jax.tree.unflatten(jax.tree.structure(layouts), leaves)

    def whole(self, leaf: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return the whole leaf of `weights`, of `shape`, as it was saved."""
        made: np.ndarray | None = None
        for indices, values in self.blocks(leaf):
            made = np.empty(shape, values.dtype) if made is None else made
            made[np.ix_(*indices)] = values
        assert made is not None, "a leaf has blocks"
        return made

    def blocks(self, leaf: str) -> Iterator[tuple[Indices, np.ndarray]]:
        """Yield a leaf of `weights` in the blocks that it was written in, each read once.

        A block is its indices in the model's leaf along each dim, and its values. Sites may have
        elements in common.
        """
        name = f"{self.weights}.{leaf}"
        arrays = [(part, saved_arrays(self.content, part.site).get(name)) for part in self.parts]
        assert any(array is not None for _, array in arrays), f"no part of the save has {name}"
        for part, array in arrays:
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


def _problem(checkpoints: Path, parts: Sequence[SavedPart]) -> str | None:
    """Say why the parts of one step are not the whole model; None: they are."""
    where = f"{checkpoints}: step {parts[0].step}"
    if damaged := [part for part in parts if part.problem]:
        return f"{where} is damaged: {damaged[0].path}: {damaged[0].problem}"
    if len({part.run for part in parts}) > 1:
        return f"{where} was saved by two runs; move the folders of one of them away"
    missing = [site for index, site in enumerate(parts[0].sites) if index not in _numbers(parts)]
    if missing and not any(part.has_all for part in parts):
        return (
            f"{where} lacks the part of site {' and '.join(missing)}; copy that site's folder "
            f"beside {parts[0].path}"
        )
    return None


def _unreadable(checkpoints: Path, parts: Sequence[SavedPart]) -> str | None:
    """Say which file of a step's parts cannot be read to its end; None: all can."""
    for part in parts:
        path = checkpoints / part.path
        if not (path / manifest.NAME).exists():  # removed meanwhile, which `is_removed` tells
            continue
        try:
            manifest.require_readable(path, manifest.read(path)["files"])
        except manifest.DamagedCheckpoint as damage:
            return f"{checkpoints}: step {part.step} is damaged: {part.path}: {damage}"
    return None


def _numbers(parts: Sequence[SavedPart]) -> set[int]:
    return {part.site for part in parts}
