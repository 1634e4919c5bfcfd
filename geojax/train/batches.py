"""From rows in a process's memory to global arrays on the mesh."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from geojax.train.step import BATCH_SPEC, SIGNALS, signals_shape


def rows_of_process(mesh: Mesh, rows: int) -> list[int]:
    """Which rows of a global batch of `rows` the devices of this process need, ascending."""
    sharding = NamedSharding(mesh, BATCH_SPEC)
    needed: set[int] = set()
    for (rows_of_device,) in sharding.addressable_devices_indices_map((rows,)).values():
        needed.update(range(rows)[rows_of_device])
    return sorted(needed)


def global_batch(
    mesh: Mesh, rows: int, local_rows: Sequence[int], local: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """The global batch as arrays sharded over the mesh, from this process's share of it.

    Args:
        mesh: the mesh.
        rows: rows of the global batch.
        local_rows: which rows `local` holds, ascending; from `rows_of_process`.
        local: arrays whose leading dimension is `len(local_rows)`.
    """
    sharding = NamedSharding(mesh, BATCH_SPEC)
    position = {row: index for index, row in enumerate(local_rows)}

    def one(values: np.ndarray) -> jax.Array:
        def of_device(index: tuple[slice, ...]) -> np.ndarray:
            first, last, _ = index[0].indices(rows)
            start = position[first]  # a device's rows are contiguous, in the share as in the batch
            return values[start : start + last - first]

        return jax.make_array_from_callback((rows, *values.shape[1:]), sharding, of_device)

    return {name: one(values) for name, values in local.items()}


def global_signals(mesh: Mesh, asked: Mapping[str, bool]) -> jax.Array:
    """What this process asks of all of them, said once, by its first device."""
    shape = signals_shape(mesh)
    values = np.array([float(asked[name]) for name in SIGNALS], shape.dtype)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    speaker = min(
        index[0].indices(shape.shape[0])[0]
        for index in sharding.addressable_devices_indices_map(shape.shape).values()
    )

    def of_device(index: tuple[slice, ...]) -> Any:
        first, last, _ = index[0].indices(shape.shape[0])
        said = np.zeros((last - first, len(SIGNALS)), shape.dtype)
        if first == speaker:
            said[0] = values
        return said

    return jax.make_array_from_callback(shape.shape, sharding, of_device)
