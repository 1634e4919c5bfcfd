"""Between the shards of the training state and what a rank computes with: gather and reduce.

Everything here takes any subtree of the parameters with the `LeafLayout`s of its leaves, inside the
step's `shard_map`: the whole tree, or one layer's slice.

    gather    shards ─(over dc, if they are cut there)─► all_gather in the site ─► a rank's parts
              (kernels may be rounded to FP8 in between: `geojax.step.fp8_all_gather`)
    reduce    a rank's gradient ─► psum_scatter in the site ─► psum over dc ─► shards

Which axes a gradient must be summed over its type says: those along which it varies and its leaf is
not cut. Ranks that share a part without sharding it (`context`; `tensor` for a leaf of which each
of them makes a part of the gradient) sum their shards as one hierarchical all-reduce with the
sites, so that each of them sends its share of the shard over `dc` and not all of it.

With a pipeline a leaf is cut over the stages and not summed over them, but for a tied table, of
whose gradient two stages make a part each. Where sites are stages nothing else here crosses `dc`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives import (
    all_gather,
    all_reduce_with_errors,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
    reduce_scatter_with_errors,
)
from geojax.collectives.axes import to_varying, varying_axes
from geojax.mesh import AXES
from geojax.optim import LeafLayout
from geojax.optim.layout import Cut
from geojax.precision import RoundedWeight, Weight, is_rounded
from geojax.step.plan import StepPlan


def gather_weights(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """This rank's parts of the weights in the compute dtype, from each rank's shards.

    Nothing crosses `dc`, unless the shards are cut over it. The weights are typed as varying over
    every axis along which ranks see other tokens, so that their gradient stays on the device until
    it is reduced.
    """
    return gather_in_site(gather_across_sites(shards, layouts, plan), layouts, plan)


@jax.named_scope("gather_weights")
def gather_across_sites(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """The first half of `gather_weights`: what is cut over `dc` too, as if it were not.

    That is in the compute dtype then, and all else as it was, but without a dimension of stages. Of
    stacked layers, one layer after the other may take the second half.
    """

    def gather(across: Any, leaves: list[jax.Array], places: list[LeafLayout]) -> list[jax.Array]:
        leaves = [
            leaf[0] if place.has_stage_dim else leaf
            for leaf, place in zip(leaves, places, strict=True)
        ]
        if not across:
            return leaves
        cast = [leaf.astype(plan.policy.compute_dtype) for leaf in leaves]
        return _gather(cast, ("dc",), places, [site_shape(place, plan) for place in places])

    return _by_group(gather, shards, layouts, lambda leaf, place: shard_axes(place)[1])


@jax.named_scope("gather_weights")
def gather_in_site(shards: Any, layouts: Any, plan: StepPlan) -> Any:
    """The second half of `gather_weights`, on the result of the first; nothing crosses `dc`.

    Some `shards` may be rounded (see `geojax.step.fp8_all_gather`): those travel as they are.
    """

    def gather(site_axes: Any, leaves: list[Weight], places: list[LeafLayout]) -> list[Weight]:
        sent = [_sent(leaf, plan) for leaf in leaves]
        if site_axes is not None:
            sent = _gather(sent, site_axes, places, [place.part_shape for place in places])
        trimmed = [
            to_varying(
                leaf[tuple(slice(size) for size in place.gathered_shape)],
                computing_axes(place, plan),
            )
            for leaf, place in zip(sent, places, strict=True)
        ]
        return [
            _received(leaf, whole, place) if isinstance(leaf, RoundedWeight) else whole
            for leaf, whole, place in zip(leaves, trimmed, places, strict=True)
        ]

    return _by_group(gather, shards, layouts, lambda leaf, place: shard_axes(place)[0])


def _sent(leaf: Weight, plan: StepPlan) -> jax.Array:
    """What is gathered of a leaf. FP8 numbers are, as plain bytes: no backend widens those."""
    if isinstance(leaf, RoundedWeight):
        return lax.bitcast_convert_type(leaf.values, jnp.uint8)
    return leaf.astype(plan.policy.compute_dtype)


def _received(leaf: RoundedWeight, whole: jax.Array, place: LeafLayout) -> RoundedWeight:
    """The rounded weight whose bytes are `whole`, gathered from shards like `leaf`.

    Its scales are too, where the shards have different ones.
    """
    scales, axes = leaf.scales, shard_axes(place)[0]
    if axes is not None and scales_are_sent(scales.ndim, place):
        shape = list(scales.shape)
        shape[_shard_dim(place)] *= _cut(place).ranks
        (scales,) = _gather([scales], axes, [place], [tuple(shape)])
        blocks = (1,) * (whole.ndim - 2) + (leaf.block or (1, 1))
        kept = [-(-size // block) for size, block in zip(whole.shape, blocks, strict=True)]
        scales = scales[tuple(slice(size) for size in kept[: scales.ndim])]
    values = lax.bitcast_convert_type(whole, leaf.values.dtype)
    made = dataclasses.replace(leaf, values=values, scales=scales)
    varying = sorted(varying_axes(values))
    return jax.tree.map(lambda x: to_varying(x, varying), made)


def scales_are_sent(dims: int, place: LeafLayout) -> bool:
    """Whether the shards of a rounded weight have different scales, which have so many dims."""
    return _shard_dim(place) < dims


def computing_axes(place: LeafLayout, plan: StepPlan) -> tuple[str, ...]:
    """The axes that a leaf's weights are typed as varying over, beside those that cut it (and the
    stages of a pipeline)."""
    context = ("context",) if plan.mesh.shape["context"] > 1 else ()
    return (*plan.batch_axes, *context, *(("tensor",) if place.partial else ()))


class Summed(NamedTuple):
    """A rank's shards of gradients, summed over all ranks that made a part of them."""

    gradients: Any
    errors: Any
    """What the wire format took away from them (see `geojax.step.error_feedback`); None: none are
    kept."""


@jax.named_scope("reduce_gradients")
def reduce_gradients(gradients: Any, errors: Any, layouts: Any, plan: StepPlan) -> Summed:
    """Each rank's shard of the gradient, summed over all ranks that made a part of it.

    Args:
        gradients: of this rank.
        errors: of this site, from the step before; None: none are kept.
        layouts: of the gradients.
        plan: how the step runs.
    """

    def reduce(
        key: Any, leaves: list[jax.Array], errors: list[jax.Array] | None, places: list[LeafLayout]
    ) -> tuple[list[jax.Array], list[jax.Array] | None]:
        (site_axes, across), beside, shared = key
        long = any(plan.mesh.shape[axis] > 1 for axis in beside)
        if site_axes is None or across or shared or long:
            shards = _scatter(site_axes, leaves, places, plan)
            return _sum_shards(key, shards, errors, places, plan)
        reduced = reduce_scatter_with_errors(
            [_padded(leaf, place) for leaf, place in zip(leaves, places, strict=True)],
            errors,
            site_axes,
            plan.outer_axes,
            dims=[_shard_dim(place) for place in places],
            chunk_bytes=plan.chunk_bytes,
            wire=plan.wire,
        )
        return hierarchical_all_reduce(reduced, beside, ())  # they are all of size 1

    return _sum_by_group(reduce, gradients, errors, layouts, plan)


@jax.named_scope("reduce_gradients")
def scatter_in_site(gradients: Any, layouts: Any, plan: StepPlan) -> Any:
    """The first half of `reduce_gradients`: the site's shards, not yet summed over other axes.

    Nothing crosses `dc`. Several such results may be added before the second half, `sum_shards`.
    """

    def scatter(key: Any, leaves: list[jax.Array], places: list[LeafLayout]) -> list[jax.Array]:
        return _scatter(key[0], leaves, places, plan)

    return _by_group(scatter, gradients, layouts, lambda leaf, place: shard_axes(place))


@jax.named_scope("reduce_gradients")
def sum_shards(shards: Any, errors: Any, layouts: Any, plan: StepPlan) -> Summed:
    """The second half of `reduce_gradients`, on the results of `scatter_in_site`."""
    finish = functools.partial(_sum_shards, plan=plan)
    return _sum_by_group(finish, shards, errors, layouts, plan)


def scatter_across(
    leaves: list[jax.Array], places: list[LeafLayout], plan: StepPlan
) -> list[jax.Array]:
    """The blocks of the sum over sites, of leaves whose shards are cut over `dc`."""
    dims = [_shard_dim(place) for place in places]
    return hierarchical_reduce_scatter(leaves, "dc", (), dims=dims, chunk_bytes=plan.chunk_bytes)


def _scatter(
    site_axes: tuple[str, ...] | None,
    leaves: list[jax.Array],
    places: list[LeafLayout],
    plan: StepPlan,
) -> list[jax.Array]:
    if site_axes is None:
        return leaves
    return hierarchical_reduce_scatter(
        [_padded(leaf, place) for leaf, place in zip(leaves, places, strict=True)],
        site_axes,
        (),
        dims=[_shard_dim(place) for place in places],
        chunk_bytes=plan.chunk_bytes,
    )


def _sum_shards(
    key: Any,
    leaves: list[jax.Array],
    errors: list[jax.Array] | None,
    places: list[LeafLayout],
    plan: StepPlan,
) -> tuple[list[jax.Array], list[jax.Array] | None]:
    (_, across), beside, shared = key
    if shared:  # a stage that does not hold the leaf has computed with zeros, perhaps to no end
        leaves = [_held(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    if across:
        in_site = hierarchical_all_reduce(leaves, beside, (), chunk_bytes=plan.chunk_bytes)
        return scatter_across(in_site, places, plan), None
    outer = "dc" if shared else plan.outer_axes
    return all_reduce_with_errors(
        leaves, errors, beside, outer, chunk_bytes=plan.chunk_bytes, wire=plan.wire
    )


def _held(leaf: jax.Array, place: LeafLayout) -> jax.Array:
    """A stage's part of a leaf, zero where it holds none."""
    if place.stages is None:
        return leaf
    return place.stages.hold(leaf[None])[0] if place.has_stage_dim else place.stages.hold(leaf)


def _on_stage(leaf: jax.Array, place: LeafLayout) -> jax.Array:
    """A reduced gradient as its weights lie between steps."""
    if place.stages is None:
        return leaf
    held = _held(to_varying(leaf, place.stages.axes), place)
    return held[None] if place.has_stage_dim else held


def _gather(
    leaves: list[jax.Array],
    axes: tuple[str, ...],
    places: list[LeafLayout],
    shapes: list[tuple[int, ...]],
) -> list[jax.Array]:
    return all_gather(leaves, axes, dims=[_shard_dim(place) for place in places], shapes=shapes)


def site_shape(place: LeafLayout, plan: StepPlan) -> tuple[int, ...]:
    """The shape of the block of a part that the sites' ranks of the same place hold together."""
    shape = list(place.part_shape)
    shape[_shard_dim(place)] //= math.prod(
        plan.mesh.shape[axis] for axis in shard_axes(place)[0] or ()
    )
    return tuple(shape)


def _padded(leaf: jax.Array, place: LeafLayout) -> jax.Array:
    missing = [(0, p - s) for p, s in zip(place.part_shape, leaf.shape, strict=True)]
    return jnp.pad(leaf, missing) if any(end for _, end in missing) else leaf


def _shard_dim(place: LeafLayout) -> int:
    return _cut(place).dim


def _cut(place: LeafLayout) -> Cut:
    assert place.shard is not None, "the leaf is not sharded"
    return place.shard


def shard_axes(place: LeafLayout) -> tuple[tuple[str, ...] | None, bool]:
    """The axes inside a site that a part is sharded over, None if it is not; whether `dc` too."""
    if place.shard is None:
        return None, False
    return tuple(axis for axis in place.shard.axes if axis != "dc"), "dc" in place.shard.axes


def _reduction(gradient: jax.Array, place: LeafLayout, plan: StepPlan) -> Any:
    """`shard_axes`, the axes of the site beside them that a gradient must be summed over, and
    whether two stages make parts of it."""
    site_axes, across = shard_axes(place)
    shared = place.stages is not None and place.stages.shared
    cut = {axis for part in place.parts for axis in part.axes} | {"dc", *(site_axes or ())}
    if not shared:
        cut |= set(plan.stage_axes)
    beside = tuple(axis for axis in AXES if axis in varying_axes(gradient) and axis not in cut)
    return (site_axes, across), beside, shared


def reduced_together(
    leaves: list[jax.Array], places: list[LeafLayout], plan: StepPlan
) -> dict[Any, list[int]]:
    """The positions of the gradients by what they are summed over (see `_reduction`)."""
    return _groups(leaves, places, functools.partial(_reduction, plan=plan))


def _by_group(
    function: Callable[[Any, list[Any], list[LeafLayout]], list[Any]],
    tree: Any,
    layouts: Any,
    key_of: Callable[[Any, LeafLayout], Hashable],
) -> Any:
    """`function` on all leaves with the same key together, so that they can share chunks."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_rounded)
    places = jax.tree.leaves(layouts)
    results: dict[int, Any] = {}
    for key, members in _groups(leaves, places, key_of).items():
        made = function(key, [leaves[i] for i in members], [places[i] for i in members])
        results.update(zip(members, made, strict=True))
    return jax.tree.unflatten(structure, [results[index] for index in range(len(leaves))])


def _sum_by_group(
    function: Callable[..., tuple[list[jax.Array], list[jax.Array] | None]],
    gradients: Any,
    errors: Any,
    layouts: Any,
    plan: StepPlan,
) -> Summed:
    """`function` on all leaves with the same reduction together, and on their errors."""
    leaves, structure = jax.tree.flatten(gradients)
    places = jax.tree.leaves(layouts)
    if plan.wire is not None:  # what a stage made to no end would spoil the blocks that it is in
        leaves = [_held(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    held = None if errors is None else jax.tree.leaves(errors)
    sums: dict[int, jax.Array] = {}
    rounded: dict[int, jax.Array] = {}
    for key, members in reduced_together(leaves, places, plan).items():
        own = [places[i] for i in members]
        before = None
        if held is not None:
            before = [held[i].reshape(_site_shard_shape(places[i])) for i in members]
        made, lost = function(key, [leaves[i] for i in members], before, own)
        sums.update(zip(members, map(_on_stage, made, own), strict=True))
        for i, error in zip(members, lost or (), strict=lost is not None):
            assert held is not None, "errors come from errors"
            rounded[i] = _on_stage(error, places[i]).reshape(held[i].shape)

    def tree_of(made: dict[int, jax.Array]) -> Any:
        return jax.tree.unflatten(structure, [made[index] for index in range(len(leaves))])

    return Summed(tree_of(sums), tree_of(rounded) if held is not None else None)


def _site_shard_shape(place: LeafLayout) -> tuple[int, ...]:
    """The shape of a shard, and of its error, where it crosses: without a dimension of stages."""
    return place.shard_shape[1:] if place.has_stage_dim else place.shard_shape


def _groups(
    leaves: list[jax.Array],
    places: list[LeafLayout],
    key_of: Callable[[jax.Array, LeafLayout], Hashable],
) -> dict[Any, list[int]]:
    """The positions of the leaves by their key."""
    groups: dict[Any, list[int]] = {}
    for index, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
        groups.setdefault(key_of(leaf, place), []).append(index)
    return groups
