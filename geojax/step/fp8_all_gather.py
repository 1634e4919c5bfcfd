"""FP8 all-gather: kernels are quantized before they are gathered, a byte a number instead of two.

    shards ─► bf16 ─► amax of each kernel ─► pmax in the site ─► scale ─► quantize ─► all_gather
                      (delayed scaling: from the history; blocks: their own; neither sends anything)

With one scale per tensor a kernel is one tensor for all of its matmuls, and a rank needs to know no
more of the other shards than their amax. The amax of all kernels travel in one message, once a
step, whatever the number of layers, passes and microbatches; it replaces those that each matmul
would send for its own kernel (`geojax.precision.linear_matmul`). With a scale per block nothing is
shared, and shards must consist of whole blocks. The result is, bit by bit, what a matmul would make
of the gathered kernel.

All other weights are gathered in the compute dtype: embeddings, norms, biases, the router, the head
and layers in bf16. So are all kernels in two cases. Under `mxfp8` matmuls quantize a kernel along
different dims. In a pipeline, a recipe with some layers in bf16 has them at a different place in
each stage.
"""

import collections
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.mesh import AXES
from geojax.models import Parameters
from geojax.optim.leaf_groups import shard_axes
from geojax.precision import AMAX, quantize_weight
from geojax.sharding import LeafLayout
from geojax.step.plan import StepPlan


class KernelAmax(NamedTuple):
    """The amax of one kernel, of all layers or of one: [layers] or []."""

    prev: jax.Array | None
    """float32 [...], of experts [..., experts], for which scales are made; None: each block has its
    own."""
    own: jax.Array | None
    """float32 [...], of this rank's shard, for the history; None: there is no history."""


def is_fp8_gathered(layout: LeafLayout, plan: StepPlan) -> bool:
    """Return True if a leaf of layers that follow the recipe is quantized before it is gathered."""
    recipe = plan.policy.recipe
    if recipe is None or not recipe.weight.serves_both_dims:
        return False
    if plan.staged_layers is not None and recipe.num_bf16_layers_per_end:
        return False
    if not layout.fp8 or not _is_sent(layout, plan):
        return False
    block = recipe.weight.along
    return block is None or _has_whole_blocks(layout, block)


def _is_sent(layout: LeafLayout, plan: StepPlan) -> bool:
    return any(plan.mesh.shape[axis] > 1 for axis in shard_axes(layout)[0] or ())


def _has_whole_blocks(layout: LeafLayout, block: int) -> bool:
    """Return True if each shard consists of whole blocks of the kernel on a rank."""
    shard = layout.shard
    if shard is None or layout.partial:  # a rank reads a slice of what it holds whole
        return False
    of_experts = shard.dim < len(layout.shape) - 2
    return of_experts or layout.model_shard_shape[shard.dim] // shard.ranks % block == 0


def sharing_axes(layout: LeafLayout, plan: StepPlan) -> tuple[str, ...]:
    """Return the axes of a site, longer than 1, that shard a kernel (of each expert)."""
    assert layout.shard is not None, "a leaf that is FP8 gathered must be sharded"
    named = {
        axis
        for sharding in layout.model_shards
        if sharding.dim >= len(layout.shape) - 2
        for axis in sharding.axes
    }
    if layout.shard.dim >= len(layout.shape) - 2:
        named |= set(shard_axes(layout)[0] or ())
    return tuple(axis for axis in AXES if axis in named and plan.mesh.shape[axis] > 1)


@jax.named_scope("gather_weights")
def kernel_amax(layers: Parameters, layouts: Any, plan: StepPlan, prev_amax: Any) -> Any:
    """Compute the `KernelAmax` of each kernel that `is_fp8_gathered`; None for other leaves.

    Current scaling sends one message in the site for each set of axes that shard kernels.

    Args:
        layers: shards of stacked layers that follow the recipe, not sharded over `dc`.
        layouts: the `LeafLayout` of each.
        plan: how the step runs.
        prev_amax: [layers, 3] of each linear layer, the amax of the steps before (see
            `geojax.step.amax_history`); None: there is no history.
    """
    leaves, structure = jax.tree.flatten_with_path(layers)
    leaf_layouts = jax.tree.leaves(layouts)
    gathered = [
        number for number, layout in enumerate(leaf_layouts) if is_fp8_gathered(layout, plan)
    ]
    made: list[KernelAmax | None] = [None] * len(leaves)
    recipe = plan.policy.recipe
    if recipe is not None and not recipe.per_tensor:
        for number in gathered:
            made[number] = KernelAmax(None, None)
        return jax.tree.unflatten(structure, made)
    groups: dict[tuple[str, ...], dict[int, jax.Array]] = collections.defaultdict(dict)
    for number in gathered:
        path, shard = leaves[number]
        cast = shard.astype(plan.policy.compute_dtype)
        largest = jnp.max(jnp.abs(cast), axis=(-2, -1)).astype(jnp.float32)
        if prev_amax is None:
            groups[sharing_axes(leaf_layouts[number], plan)][number] = largest
        else:
            names = [entry.key for entry in path[:-1]]
            of_layer = functools.reduce(operator.getitem, names, prev_amax)[AMAX]
            made[number] = _from_history(largest, of_layer)
    for axes, of_group in groups.items():
        amax_over_ranks = _max_over([*of_group.values()], axes)
        for number, amax in zip(of_group, amax_over_ranks, strict=True):
            made[number] = KernelAmax(amax, None)
    return jax.tree.unflatten(structure, made)


def _from_history(largest: jax.Array, prev_amax: jax.Array) -> KernelAmax:
    """Take amax from `prev_amax` [layers, 3], and the shard's own from `largest` [layers, ...]."""
    of_weights = prev_amax[:, 1].reshape(-1, *[1] * (largest.ndim - 1))
    own = largest.reshape(len(largest), -1).max(axis=1)
    return KernelAmax(jnp.broadcast_to(of_weights, largest.shape), own)


def _max_over(arrays: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Take each number's maximum over the ranks of `axes`, in one message."""
    if not axes:
        return arrays
    packed = lax.pmax(jnp.concatenate([array.ravel() for array in arrays]), axes)
    parts = jnp.split(packed, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


@jax.named_scope("gather_weights")
def quantize_kernels(shards: Parameters, amax: Any, plan: StepPlan) -> Parameters:
    """Quantize each kernel that has an amax, and leave all other leaves as they are."""

    def one(shard: jax.Array, own: KernelAmax | None) -> Any:
        if own is None:
            return shard
        assert plan.policy.recipe is not None, "kernels with an amax must follow a recipe"
        cast = shard.astype(plan.policy.compute_dtype)
        return quantize_weight(cast, plan.policy.recipe.weight, *own)

    return jax.tree.map(one, shards, amax)
