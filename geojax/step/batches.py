"""Global arrays on the mesh, made of the sequences in each process's memory."""

from collections.abc import Iterable, Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding

from geojax.models.parallel.sequence_order import position_order
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.program import signals_on_mesh


def sequences_of_process(plan: StepPlan, batch_size: int) -> list[int]:
    """List the sequences of a global batch that the devices of this process need, ascending."""
    spans = _spans_of_process(NamedSharding(plan.mesh, plan.sequence_spec), batch_size)
    return sorted({sequence for first, last in spans for sequence in range(first, last)})


def global_batch(
    plan: StepPlan,
    batch_size: int,
    local_sequences: Iterable[int],
    local: Mapping[str, np.ndarray],
) -> dict[str, jax.Array]:
    """Make the global batch, as arrays sharded over the mesh, of each process's share of it.

    Args:
        plan: the mesh, and how it shares sequences and their positions.
        batch_size: sequences of the global batch.
        local_sequences: the numbers of those in `local`, ascending, from `sequences_of_process`.
        local: arrays [len(local_sequences)] or [len(local_sequences), S], positions in natural
            order.
    """
    index_of = {int(sequence): index for index, sequence in enumerate(local_sequences)}

    def one(values: np.ndarray) -> jax.Array:
        spec = plan.sequence_spec if values.ndim == 1 else plan.token_spec
        if values.ndim > 1 and plan.parallelism.context > 1:
            values = values[:, position_order(values.shape[1], plan.parallelism)]

        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            first, last = _span(index, batch_size)
            start = index_of[first]  # a device's sequences are contiguous, in the share too
            positions = index[1:] if index else ()
            return values[(slice(start, start + last - first), *positions)]

        shape = (batch_size, *values.shape[1:])
        sharding = NamedSharding(plan.mesh, spec)
        return jax.make_array_from_callback(shape, sharding, of_device)

    return {name: one(values) for name, values in local.items()}


def global_signals(plan: StepPlan, requests: Mapping[str, bool]) -> jax.Array:
    """Make the signals of all ranks; the first device of each process carries its requests."""
    signals = signals_on_mesh(plan)
    ranks = signals.shape[0]
    values = np.array([float(requests[name]) for name in SIGNALS], signals.dtype)
    carrier = min(_spans_of_process(signals.sharding, ranks))

    def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
        first, last = _span(index, ranks)
        share = np.zeros((last - first, len(SIGNALS)), signals.dtype)
        if (first, last) == carrier:
            share[0] = values
        return share

    return jax.make_array_from_callback(signals.shape, signals.sharding, of_device)


def _spans_of_process(sharding: NamedSharding, size: int) -> set[tuple[int, int]]:
    """List first and last (excluded) entry of each share that this process's devices hold."""
    return {
        _span(index, size) for index in sharding.addressable_devices_indices_map((size,)).values()
    }


def _span(index: tuple[slice, ...] | None, size: int) -> tuple[int, int]:
    assert index is not None, "an addressable device must have a share"
    first, last, _ = index[0].indices(size)
    return first, last
