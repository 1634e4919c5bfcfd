"""Gather weights: a rank's parts of them in the compute dtype, from the shards of the state.

Everything here takes any subtree of the parameters with the `LeafLayout`s of its leaves, inside the
step's `shard_map`: the whole tree, or one layer's slice.

    shards ─(all_gather over dc, if sharded there)─► all_gather in the site ─► a rank's parts

Weights may be quantized to FP8 in between (`geojax.step.fp8_all_gather`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives import all_gather
from geojax.collectives.axes import to_varying, varying_axes
from geojax.optim.leaf_groups import map_by_group, shard_axes, shard_dim
from geojax.precision import QuantizedWeight, Weight
from geojax.sharding import LeafLayout
from geojax.step.plan import StepPlan


def gather_weights(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Gather this rank's parts of the weights, in the compute dtype.

    Nothing crosses `dc` unless the state is sharded over it. The weights are typed as varying over
    every axis along which ranks see other tokens, so that their gradient stays on the device until
    it is reduced.
    """
    return gather_in_site(gather_across_sites(shards, layouts, plan), layouts, plan)


@jax.named_scope("gather_weights")
def gather_across_sites(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Gather over `dc` the leaves that are sharded over it: the first half of `gather_weights`.

    Those come out in the compute dtype, all others as they were, and none has a dimension of
    stages. Of stacked layers, one layer after the other may take the second half.
    """

    def gather(
        across: Any, leaves: list[jax.Array], leaf_layouts: list[LeafLayout]
    ) -> list[jax.Array]:
        leaves = [
            leaf[0] if layout.has_stage_dim else leaf
            for leaf, layout in zip(leaves, leaf_layouts, strict=True)
        ]
        if not across:
            return leaves
        cast = [
            leaf.astype(layout.gathered_dtype(plan.policy.compute_dtype))
            for leaf, layout in zip(leaves, leaf_layouts, strict=True)
        ]
        return _gather(
            cast, ("dc",), leaf_layouts, [site_shape(layout, plan) for layout in leaf_layouts]
        )

    return map_by_group(gather, shards, layouts, lambda layout: shard_axes(layout)[1])


@jax.named_scope("gather_weights")
def gather_in_site(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """Gather inside the site: the second half of `gather_weights`; nothing crosses `dc`.

    Some `shards` may be quantized (see `geojax.step.fp8_all_gather`): those travel as they are.
    """

    def gather(
        site_axes: Any, leaves: list[Weight], leaf_layouts: list[LeafLayout]
    ) -> list[Weight]:
        sent = [
            _sent(leaf, layout, plan) for leaf, layout in zip(leaves, leaf_layouts, strict=True)
        ]
        if site_axes is not None:
            sent = _gather(
                sent, site_axes, leaf_layouts, [layout.model_shard_shape for layout in leaf_layouts]
            )
        trimmed = [
            to_varying(
                leaf[tuple(slice(size) for size in layout.gathered_shape)],
                computing_axes(layout, plan),
            )
            for leaf, layout in zip(sent, leaf_layouts, strict=True)
        ]
        return [
            _received(leaf, gathered, layout, plan)
            if isinstance(leaf, QuantizedWeight)
            else gathered
            for leaf, gathered, layout in zip(leaves, trimmed, leaf_layouts, strict=True)
        ]

    return map_by_group(gather, shards, layouts, lambda layout: shard_axes(layout)[0])


def _sent(leaf: Weight, layout: LeafLayout, plan: StepPlan) -> jax.Array:
    """Cast a leaf to what is sent: FP8 numbers to plain bytes, which no backend widens."""
    if isinstance(leaf, QuantizedWeight):
        return lax.bitcast_convert_type(leaf.values, jnp.uint8)
    return leaf.astype(layout.gathered_dtype(plan.policy.compute_dtype))


def _received(
    leaf: QuantizedWeight, gathered: jax.Array, layout: LeafLayout, plan: StepPlan
) -> QuantizedWeight:
    """Make the quantized weight whose bytes are `gathered`, gathered from shards like `leaf`.

    Its scales are gathered here, where the shards have different ones.
    """
    scales, axes = leaf.scales, shard_axes(layout)[0]
    if axes is not None and scales_are_sent(scales.ndim, layout):
        shape = list(scales.shape)
        shape[shard_dim(layout)] *= math.prod(plan.mesh.shape[axis] for axis in axes)
        (scales,) = _gather([scales], axes, [layout], [tuple(shape)])
        blocks = (1,) * (gathered.ndim - 2) + (leaf.block or (1, 1))
        kept = [-(-size // block) for size, block in zip(gathered.shape, blocks, strict=True)]
        scales = scales[tuple(slice(size) for size in kept[: scales.ndim])]
    values = lax.bitcast_convert_type(gathered, leaf.values.dtype)
    made = dataclasses.replace(leaf, values=values, scales=scales)
    varying = sorted(varying_axes(values))
    return jax.tree.map(lambda x: to_varying(x, varying), made)


def scales_are_sent(dims: int, layout: LeafLayout) -> bool:
    """Return True if the shards of a quantized weight have different scales, an array of `dims`."""
    return shard_dim(layout) < dims


def computing_axes(layout: LeafLayout, plan: StepPlan) -> tuple[str, ...]:
    """Return the axes over which a gathered leaf varies, beside those that shard it and stages."""
    context = ("context",) if plan.mesh.shape["context"] > 1 else ()
    return (*plan.batch_axes, *context, *(("tensor",) if layout.partial else ()))


def _gather(
    leaves: list[jax.Array],
    axes: tuple[str, ...],
    leaf_layouts: list[LeafLayout],
    shapes: list[tuple[int, ...]],
) -> list[jax.Array]:
    return all_gather(
        leaves, axes, dims=[shard_dim(layout) for layout in leaf_layouts], shapes=shapes
    )


def site_shape(layout: LeafLayout, plan: StepPlan) -> tuple[int, ...]:
    """Return the shape of a rank's block of a part, once it is gathered over `dc`."""
    shape = list(layout.model_shard_shape)
    shape[shard_dim(layout)] //= math.prod(
        plan.mesh.shape[axis] for axis in shard_axes(layout)[0] or ()
    )
    return tuple(shape)
