"""Kernels that are rounded to FP8 before they are gathered: a byte a number travels, not two.

    shards ─► bf16 ─► largest of each kernel ─► pmax in the site ─► scale ─► round ─► all_gather
                      (delayed scaling: from the history; blocks: their own; neither sends anything)

Under a recipe of one scale per tensor a kernel is one tensor for all of its products, and who holds
a shard needs to know no more of the others than their largest magnitude. Those of all kernels
travel in one message, once a step, whatever the number of layers, passes and microbatches; it takes
the place of those that each product would send for its own (`geojax.precision.linear_matmul`).
Blocks need to know nothing of each other; shards have to consist of whole ones. What comes out is
what a product would make of the gathered kernel, bit by bit.

All else is gathered in the compute dtype: embeddings, norms, biases, the router, the head; layers
that follow no recipe; all kernels under `mxfp8`, which its products round along different dims;
and, in a pipeline, all of them under a recipe with plain layers, since which rows of a stage are
plain depends on the stage.
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
from geojax.optim import LeafLayout
from geojax.precision import AMAX, quantize_weight
from geojax.step.gather import shard_axes
from geojax.step.plan import StepPlan


class Magnitudes(NamedTuple):
    """Of this rank's shard of one kernel, of all layers or of one: [layers] or []."""

    expected: jax.Array | None
    """float32 [...], of experts [..., experts]: what scales are made for; None: blocks have theirs.
    """
    own: jax.Array | None
    """float32 [...]: the largest in the shard, for a history; None: there is none."""


def is_fp8_gathered(path: tuple[Any, ...], place: LeafLayout, plan: StepPlan) -> bool:
    """Whether a leaf of layers that follow the recipe is rounded before it is gathered."""
    recipe = plan.policy.recipe
    if recipe is None or not recipe.weight.serves_both_dims:
        return False
    if plan.staged_layers is not None and recipe.num_bf16_layers_per_end:
        return False
    if path[-1].key != "kernel" or path[-2].key == "router" or not _is_sent(place, plan):
        return False
    block = recipe.weight.along
    return block is None or _has_whole_blocks(place, block)


def _is_sent(place: LeafLayout, plan: StepPlan) -> bool:
    return any(plan.mesh.shape[axis] > 1 for axis in shard_axes(place)[0] or ())


def _has_whole_blocks(place: LeafLayout, block: int) -> bool:
    """Whether each shard consists of blocks of the kernel that a rank computes with."""
    shard = place.shard
    if shard is None or place.partial:  # a rank reads a slice of what it holds whole
        return False
    of_experts = shard.dim < len(place.shape) - 2
    return of_experts or place.part_shape[shard.dim] // shard.ranks % block == 0


def sharing_axes(place: LeafLayout, plan: StepPlan) -> tuple[str, ...]:
    """The axes of a site, longer than 1, over whose ranks a kernel (of each expert) lies."""
    assert place.shard is not None, "it has shards"
    named = {axis for cut in place.parts if cut.dim >= len(place.shape) - 2 for axis in cut.axes}
    if place.shard.dim >= len(place.shape) - 2:
        named |= set(shard_axes(place)[0] or ())
    return tuple(axis for axis in AXES if axis in named and plan.mesh.shape[axis] > 1)


@jax.named_scope("gather_weights")
def kernel_magnitudes(layers: Parameters, layouts: Any, plan: StepPlan, expected: Any) -> Any:
    """The `Magnitudes` of each kernel that `is_fp8_gathered`, None in the place of other leaves.

    Current scaling sends one message in the site: one for each set of axes over which kernels lie.

    Args:
        layers: shards of stacked layers that follow the recipe, not cut over `dc`.
        layouts: the `LeafLayout` of each.
        plan: how the step runs.
        expected: [layers, 3] of each linear layer (see `geojax.step.amax_history`); None: none.
    """
    leaves, structure = jax.tree.flatten_with_path(layers)
    places = jax.tree.leaves(layouts)
    rounded = [
        number
        for number, ((path, _), place) in enumerate(zip(leaves, places, strict=True))
        if is_fp8_gathered(path, place, plan)
    ]
    made: list[Magnitudes | None] = [None] * len(leaves)
    recipe = plan.policy.recipe
    if recipe is not None and not recipe.per_tensor:
        for number in rounded:
            made[number] = Magnitudes(None, None)
        return jax.tree.unflatten(structure, made)
    groups: dict[tuple[str, ...], dict[int, jax.Array]] = collections.defaultdict(dict)
    for number in rounded:
        path, shard = leaves[number]
        cast = shard.astype(plan.policy.compute_dtype)
        largest = jnp.max(jnp.abs(cast), axis=(-2, -1)).astype(jnp.float32)
        if expected is None:
            groups[sharing_axes(places[number], plan)][number] = largest
        else:
            names = [entry.key for entry in path[:-1]]
            of_layer = functools.reduce(operator.getitem, names, expected)[AMAX]
            made[number] = _by_history(largest, of_layer)
    for axes, members in groups.items():
        for number, whole in zip(members, _largest_of_all([*members.values()], axes), strict=True):
            made[number] = Magnitudes(whole, None)
    return jax.tree.unflatten(structure, made)


def _by_history(largest: jax.Array, expected: jax.Array) -> Magnitudes:
    """From `largest` [layers], of experts [layers, experts], and `expected` [layers, 3]."""
    of_weights = expected[:, 1].reshape(-1, *[1] * (largest.ndim - 1))
    own = largest.reshape(len(largest), -1).max(axis=1)
    return Magnitudes(jnp.broadcast_to(of_weights, largest.shape), own)


def _largest_of_all(arrays: list[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Each number's largest over the ranks of `axes`, in one message."""
    if not axes:
        return arrays
    packed = lax.pmax(jnp.concatenate([array.ravel() for array in arrays]), axes)
    parts = jnp.split(packed, np.cumsum([array.size for array in arrays])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


@jax.named_scope("gather_weights")
def round_kernels(shards: Parameters, magnitudes: Any, plan: StepPlan) -> Parameters:
    """`shards`, with a `QuantizedWeight` in the place of each kernel that has `magnitudes`."""

    def one(shard: jax.Array, own: Magnitudes | None) -> Any:
        if own is None:
            return shard
        assert plan.policy.recipe is not None, "a recipe says what to round to"
        cast = shard.astype(plan.policy.compute_dtype)
        return quantize_weight(cast, plan.policy.recipe.weight, *own)

    return jax.tree.map(one, shards, magnitudes)
