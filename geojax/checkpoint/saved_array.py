"""The elements of the model's leaf that an array in a checkpoint holds, dim by dim.

A checkpoint holds what the devices held, padding included, so that nothing moves between them for a
save. Along each dim an array of a checkpoint is a list of *runs*: this many positions of the saved
array, from here, are so many indices of the model's leaf, from there.

    8 layers, the second of two stages holds 5, 6 and 7 and a padding layer
    saved positions   0  1  2  3
    model's indices   5  6  7  -     one run: (5, 0, 3)

Padding belongs to no run. A shard that a device of any layout needs is read as boxes: along each
dim the positions that one array has.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorstore
from jax.sharding import Mesh

from geojax.named_arrays import is_expendable
from geojax.sharding.leaf_layouts import PADDING, LeafLayout

Indices = tuple[np.ndarray, ...]
"""Along each dim of a leaf the model's index of each position; `PADDING` where there is none."""


Reads = list[tuple[np.ndarray, Any, Any]]
"""Reads under way: the array that gets the result, the positions in it, and the future."""


class Run(NamedTuple):
    """Positions of a saved array that follow one another, as indices of the model's leaf do."""

    first_index: int
    first_position: int
    length: int


class SavedArray(NamedTuple):
    """The part of the model's leaf that the array of one site holds."""

    dims: tuple[tuple[Run, ...], ...]

    @classmethod
    def of_site(cls, layout: LeafLayout, mesh: Mesh, site: int | None) -> "SavedArray | None":
        """Describe what the devices of a site hold of a leaf; None where they hold nothing.

        Args:
            layout: of the leaf on `mesh`.
            mesh: all sites.
            site: index along `dc`; None: all sites together.
        """
        indices = indices_of_site(layout, mesh, site)
        if layout.has_stage_dim:
            if (indices[0] == PADDING).all():
                return None
            indices = indices[1:]
        return cls(tuple(_runs(dim) for dim in indices))

    @classmethod
    def from_json(cls, dims: Sequence[Sequence[Sequence[int]]]) -> "SavedArray":
        """Invert the JSON form of `dims`."""
        return cls(tuple(tuple(Run(*run) for run in dim) for dim in dims))

    def positions(self, shape: Sequence[int]) -> Indices:
        """Return along each dim the saved position of each index of the model's leaf.

        It is `PADDING` for an index that the array does not hold.
        """
        return self._filled(shape, lambda run: (run.first_index, run.first_position))

    def indices(self, shape: Sequence[int]) -> Indices:
        """Return along each dim the model's index of each position of the saved array.

        It is `PADDING` for a position that belongs to no run.
        """
        return self._filled(shape, lambda run: (run.first_position, run.first_index))

    def _filled(self, shape: Sequence[int], ends: Callable[[Run], tuple[int, int]]) -> Indices:
        """Fill the entries of each run, from the first of `ends` on, by numbers from the other."""
        filled = tuple(np.full(size, PADDING) for size in shape)
        for dim, runs in zip(filled, self.dims, strict=True):
            for run in runs:
                first, number = ends(run)
                dim[first : first + run.length] = np.arange(number, number + run.length)
        return filled


def indices_of_site(layout: LeafLayout, mesh: Mesh, site: int | None) -> Indices:
    """Return what the devices of one site, or of all, hold along each padded dim of a leaf."""
    indices = layout.model_indices()
    if site is None:
        return indices
    return tuple(
        _blocks_of_site(dim, axes, mesh, site)
        for dim, axes in zip(indices, layout.padded_axes(), strict=True)
    )


def _blocks_of_site(dim: np.ndarray, axes: tuple[str, ...], mesh: Mesh, site: int) -> np.ndarray:
    if "dc" not in axes:
        return dim
    blocks = dim.reshape(*(mesh.shape[axis] for axis in axes), -1)
    return np.take(blocks, site, axis=axes.index("dc")).ravel()


def _runs(indices: np.ndarray) -> tuple[Run, ...]:
    """Return the runs of a dim."""
    (held,) = np.nonzero(indices != PADDING)
    if held.size == 0:
        return ()
    breaks = np.flatnonzero((np.diff(held) != 1) | (np.diff(indices[held]) != 1)) + 1
    return tuple(
        Run(int(indices[part[0]]), int(part[0]), len(part)) for part in np.split(held, breaks)
    )


class ArrayPiece(NamedTuple):
    """A saved array: where its elements stand, and how to read them."""

    positions: Indices
    """Along each dim the saved position of each index of the model's leaf."""
    store: Any
    """The open TensorStore; None where another site reads this piece."""


class Box(NamedTuple):
    """Elements of a shard that one piece holds: a product of positions along each dim."""

    piece: ArrayPiece
    at: Indices
    """Positions in the shard."""
    source: Indices
    """Positions in the piece."""


def split_into_boxes(
    wanted: Indices, pieces: Sequence[ArrayPiece]
) -> tuple[list[Box], list[Indices]]:
    """Divide a shard among the pieces, each element to the first that holds it.

    Args:
        wanted: the model's index of each position of the shard, `PADDING` where it has none.
        pieces: all arrays of the leaf in the checkpoint.

    Returns:
        The boxes, which do not overlap, and the positions of those that no piece holds.
    """
    boxes = []
    everything = tuple(np.flatnonzero(dim != PADDING) for dim in wanted)
    left: list[Indices] = [everything] if _is_filled(everything) else []
    for piece in pieces:
        remaining: list[Indices] = []
        for at in left:
            inside: Indices = ()
            for dim, positions in enumerate(at):
                held = piece.positions[dim][wanted[dim][positions]] != PADDING
                remaining.append((*inside, positions[~held], *at[dim + 1 :]))
                inside = (*inside, positions[held])
            source = tuple(
                piece.positions[dim][wanted[dim][positions]] for dim, positions in enumerate(inside)
            )
            boxes.append(Box(piece, inside, source))
        left = [at for at in remaining if _is_filled(at)]
    return [box for box in boxes if _is_filled(box.at)], left


def start_reading(shard: np.ndarray, boxes: Sequence[Box]) -> Reads:
    """Start to read the boxes of `shard` whose pieces are open."""
    return [
        (shard, np.ix_(*box.at), box.piece.store.oindex[tuple(map(_slice, box.source))].read())
        for box in boxes
        if box.piece.store is not None
    ]


def open_array(folder: Path, name: str) -> Any:
    """Start to open the array called `name` of the checkpoint in `folder`; `result()` waits."""
    base = {"driver": "file", "path": f"{folder}/"}
    kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True, open=True)


def held_by_all(arrays: Mapping[str, SavedArray], shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether `arrays` hold every element of all leaves of `shapes` but expendable ones."""
    return all(
        name in arrays and all(PADDING not in dim for dim in arrays[name].positions(shape))
        for name, shape in shapes.items()
        if not is_expendable(name)
    )


def _is_filled(at: Indices) -> bool:
    return all(positions.size for positions in at)


def _slice(positions: np.ndarray) -> Any:
    """Return positions as a slice where they follow one another."""
    if positions.size and (np.diff(positions) == 1).all():
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return positions
