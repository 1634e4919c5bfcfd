"""The weights of the trained model, gathered on one device."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from geojax.accelerators import accelerator_of
from geojax.models import AnyModel, parameter_count
from geojax.quantities import quantity
from geojax.runtime.device_memory import usable_memory
from geojax.sharding import LeafLayout, bytes_per_device
from geojax.step.plan import StepPlan
from geojax.step.state import TrainState


def ungathered_reason(model: AnyModel, layouts: TrainState, plan: StepPlan) -> str | None:
    """Say why the whole model does not fit on one device, beside the state; None: it does.

    Nothing is known of the memory of simulated devices. All processes come to the same answer,
    whatever the environment of each.
    """
    accelerator = accelerator_of(plan.mesh.devices.flat[0])
    if accelerator is None:
        return None
    usable = usable_memory(accelerator, {})
    if usable is None:
        return None
    size = plan.policy.compute_dtype.itemsize
    # A leaf is gathered and trimmed before the next one.
    largest = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(layouts.weights))
    copies = 1 if model.lora is None else 2  # merged weights beside those that were gathered
    needed = (copies * parameter_count(model) + largest) * size
    room = usable.bytes - bytes_per_device(layouts)
    if needed <= room:
        return None
    return (
        f"the whole model needs {quantity(needed, 'B')} on one device, and {quantity(room, 'B')} "
        f"of {usable.of} are free beside the state"
    )


def gather_full_params(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Return the weights in the compute dtype, unsharded, on process 0's first device.

    A collective: every process calls it, and the others get None. One leaf is gathered after the
    other, so that no device but that one ever holds more than one.
    """
    everywhere = NamedSharding(plan.mesh, PartitionSpec())
    first = jax.process_index() == 0

    def gather(shard: jax.Array, leaf_layout: LeafLayout) -> jax.Array | None:
        dtype = leaf_layout.gathered_dtype(plan.policy.compute_dtype)
        trim = jax.jit(
            lambda leaf: leaf_layout.trim(leaf.astype(dtype)),
            out_shardings=everywhere,
        )
        whole = trim(shard)
        return whole.addressable_data(0) if first else None

    gathered = jax.tree.map(gather, shards, layouts)
    return gathered if first else None
