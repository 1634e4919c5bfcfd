"""From rows in a process's memory to global arrays on the mesh."""

from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding

from geojax.models.parallel.sequence_order import column_order
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.program import signals_on_mesh


def rows_of_process(plan: StepPlan, rows: int) -> list[int]:
    """Which rows of a global batch of `rows` the devices of this process need, ascending."""
    spans = _spans_of_process(NamedSharding(plan.mesh, plan.row_spec), rows)
    return sorted({row for first, last in spans for row in range(first, last)})


def global_batch(
    plan: StepPlan, rows: int, local_rows: Iterable[int], local: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """The global batch as arrays sharded over the mesh, from this process's share of it.

    Args:
        plan: the mesh, and how it shares rows and columns.
        rows: rows of the global batch.
        local_rows: which rows `local` holds, ascending; from `rows_of_process`.
        local: arrays [len(local_rows)] or [len(local_rows), sequence], columns in natural order.
    """
    position = {int(row): place for place, row in enumerate(local_rows)}

    def one(values: np.ndarray) -> jax.Array:
        spec = plan.row_spec if values.ndim == 1 else plan.token_spec
        if values.ndim > 1 and plan.parallelism.context > 1:
            values = values[:, column_order(values.shape[1], plan.parallelism)]

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            first, last = _span(index, rows)
            start = position[first]  # a device's rows are contiguous, in the share as in the batch
            columns = index[1:] if index else ()
            return values[(slice(start, start + last - first), *columns)]

        shape = (rows, *values.shape[1:])
        sharding = NamedSharding(plan.mesh, spec)
        return jax.make_array_from_callback(shape, sharding, of_device)

    return {name: one(values) for name, values in local.items()}


def global_signals(plan: StepPlan, asked: Mapping[str, bool]) -> jax.Array:
    """What this process asks of all of them, said once, by its first device."""
    signals = signals_on_mesh(plan)
    ranks = signals.shape[0]
    values = np.array([float(asked[name]) for name in SIGNALS], signals.dtype)
    speaker = min(_spans_of_process(signals.sharding, ranks))

    def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
        first, last = _span(index, ranks)
        said = np.zeros((last - first, len(SIGNALS)), signals.dtype)
        if (first, last) == speaker:
            said[0] = values
        return said

    return jax.make_array_from_callback(signals.shape, signals.sharding, of_device)


def _spans_of_process(sharding: NamedSharding, size: int) -> set[tuple[int, int]]:
    """First and last (excluded) entry of each share of `size` that this process's devices hold."""
    return {
        _span(index, size) for index in sharding.addressable_devices_indices_map((size,)).values()
    }


def _span(index: tuple[slice, ...] | None, size: int) -> tuple[int, int]:
    assert index is not None, "an addressable device has a share"
    first, last, _ = index[0].indices(size)
    return first, last
