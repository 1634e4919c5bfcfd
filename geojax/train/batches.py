"""From rows in a process's memory to global arrays on the mesh."""

from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from geojax.train.step import BATCH_SPEC, SIGNALS, signals_shape


def rows_of_process(mesh: Mesh, rows: int) -> list[int]:
    """Which rows of a global batch of `rows` the devices of this process need, ascending."""
    spans = _spans_of_process(NamedSharding(mesh, BATCH_SPEC), rows)
    return sorted({row for first, last in spans for row in range(first, last)})


def global_batch(
    mesh: Mesh, rows: int, local_rows: Iterable[int], local: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """The global batch as arrays sharded over the mesh, from this process's share of it.

    Args:
        mesh: the mesh.
        rows: rows of the global batch.
        local_rows: which rows `local` holds, ascending; from `rows_of_process`.
        local: arrays whose leading dimension is `len(local_rows)`.
    """
    sharding = NamedSharding(mesh, BATCH_SPEC)
    position = {int(row): place for place, row in enumerate(local_rows)}

    def one(values: np.ndarray) -> jax.Array:
        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            first, last = _span(index, rows)
            start = position[first]  # a device's rows are contiguous, in the share as in the batch
            return values[start : start + last - first]

        return jax.make_array_from_callback((rows, *values.shape[1:]), sharding, of_device)

    return {name: one(values) for name, values in local.items()}


def global_signals(mesh: Mesh, asked: Mapping[str, bool]) -> jax.Array:
    """What this process asks of all of them, said once, by its first device."""
    shape = signals_shape(mesh)
    ranks = shape.shape[0]
    values = np.array([float(asked[name]) for name in SIGNALS], shape.dtype)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    speaker = min(_spans_of_process(sharding, ranks))

    def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
        first, last = _span(index, ranks)
        said = np.zeros((last - first, len(SIGNALS)), shape.dtype)
        if (first, last) == speaker:
            said[0] = values
        return said

    return jax.make_array_from_callback(shape.shape, sharding, of_device)


def _spans_of_process(sharding: NamedSharding, size: int) -> set[tuple[int, int]]:
    """First and last (excluded) entry of each share of `size` that this process's devices hold."""
    return {
        _span(index, size) for index in sharding.addressable_devices_indices_map((size,)).values()
    }


def _span(index: tuple[slice, ...] | None, size: int) -> tuple[int, int]:
    assert index is not None, "an addressable device has a share"
    first, last, _ = index[0].indices(size)
    return first, last
