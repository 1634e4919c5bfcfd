"""Reduce gradients: each rank's shard of the sum over all ranks that made a part of it.

Everything here takes any subtree of the parameters with the `LeafLayout`s of its leaves, inside the
step's `shard_map`: the whole tree, or a few layers' slice.

    start       psum_scatter in the site, sum over other axes of the site, encode
    exchange    psum over dc, or messages in a wire format
    done        decode

A gradient is summed over every axis in its varying-axes type that its leaf is not sharded on. Some
ranks share a part without sharding it: ranks of `context`, and ranks of `tensor` that each make a
part of a leaf's gradient. They and the sites sum their shards in one hierarchical all-reduce, so
that each rank sends only its share of the shard over `dc`.

With a pipeline the layers are sharded over the stages. A table or norm outside the layers is on one
stage, and its gradient is zero on all others. Before this gradient crosses to other sites, the
stages sum it, so that each stage sends a share. Two stages each make a part of a tied table's
gradient; where sites are stages, nothing else here crosses `dc`.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives import (
    Reduction,
    all_reduce,
    reduce_scatter,
    start_all_reduce,
    start_reduce_scatter,
)
from geojax.collectives.axes import drop_single, to_varying, varying_axes
from geojax.collectives.buckets import plan_buckets
from geojax.collectives.exchange import SiteSum, exchange_together
from geojax.mesh import AXES
from geojax.optim.leaf_groups import group, map_by_group, shard_axes, shard_dim
from geojax.sharding import LeafLayout
from geojax.step.plan import StepPlan


class ReducedGradients(NamedTuple):
    """A rank's shards of gradients, summed over all ranks that made a part of them."""

    gradients: Any
    error_feedback: Any
    """Rounding errors of the wire format (see `geojax.step.error_feedback`); None: none kept."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["sums"],
    meta_fields=["positions", "layouts", "structure", "bucket_bytes", "error_shapes"],
)
@dataclasses.dataclass(frozen=True)
class GradReduce:
    """A reduction of gradients under way; a pytree."""

    sums: tuple[Reduction | list[jax.Array], ...]
    """One for each group of leaves that are reduced together. A list: leaves that are sharded over
    `dc` too."""
    positions: tuple[tuple[int, ...], ...]
    """The positions of each group's leaves."""
    layouts: tuple[LeafLayout, ...]
    """The layout of each leaf."""
    structure: Any
    bucket_bytes: int | None
    error_shapes: tuple[tuple[int, ...], ...] | None
    """The shape of each leaf's error feedback; None: none is kept."""

    def exchange(self, *, own_stream: bool = False) -> "GradReduce":
        """Send the started messages to the other sites, and receive theirs.

        Short ones of several groups travel together: each costs a round trip. With `own_stream`,
        on GPUs on a stream that no other collective uses.
        """
        reductions = [each for each in self.sums if isinstance(each, Reduction)]
        started = [each for reduction in reductions for each in reduction.sums]
        sizes = [size for reduction in reductions for size in reduction.bytes_in_site]
        exchanged = dict[int, SiteSum]()
        for together in message_plan(sizes, [each.kind for each in started], self.bucket_bytes):
            made = exchange_together([started[i] for i in together], own_stream=own_stream)
            exchanged.update(zip(together, made, strict=True))
        in_order = (exchanged[i] for i in range(len(started)))

        def of_group(begun: Reduction | list[jax.Array], positions: tuple[int, ...]) -> Any:
            if isinstance(begun, Reduction):
                return dataclasses.replace(begun, sums=tuple(next(in_order) for _ in begun.sums))
            dims = [shard_dim(self.layouts[i]) for i in positions]
            return reduce_scatter(begun, "dc", (), dims=dims, bucket_bytes=self.bucket_bytes)

        return dataclasses.replace(self, sums=tuple(map(of_group, self.sums, self.positions)))

    def done(self) -> ReducedGradients:
        """Decode the exchanged messages, and return each rank's shards."""
        totals: dict[int, jax.Array] = {}
        errors: dict[int, jax.Array] = {}
        for begun, positions in zip(self.sums, self.positions, strict=True):
            made = begun.done() if isinstance(begun, Reduction) else begun
            if self.error_shapes is not None:
                made, lost = made
                errors.update(zip(positions, lost, strict=True))
            totals.update(zip(positions, made, strict=True))
        gradients = self._tree([_on_stage(totals[i], each) for i, each in enumerate(self.layouts)])
        if self.error_shapes is None:
            return ReducedGradients(gradients, None)
        # Of a leaf that is summed over stages the errors are on all of them.
        on_stages = [
            errors[i][None] if each.has_stage_dim else _on_stage(errors[i], each)
            for i, each in enumerate(self.layouts)
        ]
        shaped = [
            error.reshape(shape) for error, shape in zip(on_stages, self.error_shapes, strict=True)
        ]
        return ReducedGradients(gradients, self._tree(shaped))

    def _tree(self, leaves: list[jax.Array]) -> Any:
        return jax.tree.unflatten(self.structure, leaves)


def message_plan(
    sizes: Sequence[int], kinds: Sequence[Hashable], bucket_bytes: int | None
) -> list[list[int]]:
    """Return the positions of buckets that cross `dc` in one message each.

    Args:
        sizes: the bytes of each bucket in a site, all ranks together.
        kinds: of each bucket; those of different kinds share no message.
        bucket_bytes: the most bytes of buckets that share one; None: each is one by itself.
    """
    limits = [None if bucket_bytes is None else max(bucket_bytes, size) for size in sizes]
    plan = plan_buckets(sizes, kinds, limits)
    return [[piece.leaf for piece in bucket.pieces] for bucket in plan.buckets]


@jax.named_scope("reduce_gradients")
def reduce_gradients(
    gradients: Any, error_feedback: Any, layouts: Any, plan: StepPlan
) -> ReducedGradients:
    """Reduce gradients in one go; arguments as `start_grad_reduce`."""
    return start_grad_reduce(gradients, error_feedback, layouts, plan).exchange().done()


@jax.named_scope("reduce_gradients")
def inter_site_all_reduce(
    shards: Any, error_feedback: Any, layouts: Any, plan: StepPlan
) -> ReducedGradients:
    """Sum the results of `intra_site_reduce_scatter` over the sites, in one go.

    The other arguments are those of `start_grad_reduce`.
    """
    return (
        start_grad_reduce(shards, error_feedback, layouts, plan, scattered=True).exchange().done()
    )


@jax.named_scope("reduce_gradients")
def intra_site_reduce_scatter(gradients: Any, layouts: Any, plan: StepPlan) -> Any:
    """Sum gradients over the axes of a site that shard their leaves; each rank keeps its shard.

    Nothing crosses `dc`. Several such results may be added before they are summed over sites.
    """

    def scatter(
        sharded: tuple[tuple[str, ...] | None, bool],
        leaves: list[jax.Array],
        layouts: list[LeafLayout],
    ) -> list[jax.Array]:
        return _scatter(sharded[0], leaves, layouts, plan)

    return map_by_group(scatter, gradients, layouts, shard_axes)


def accumulate_in_site(accumulated: Any, gradients: Any, layouts: Any, plan: StepPlan) -> Any:
    """Add the gradients of the last microbatch, and reduce-scatter the sum inside the site.

    Args:
        accumulated: of all microbatches before: whole, or shards from ZeRO 2 on; None: there are
            none.
        gradients: of the last microbatch.
        layouts: the `LeafLayout` of each leaf.
        plan: how the step runs.
    """
    total = jax.tree.map(lambda leaf: leaf.astype(plan.policy.reduce_dtype), gradients)
    if accumulated is None:
        return intra_site_reduce_scatter(total, layouts, plan)
    if plan.layout.zero.stage < 2:
        total = jax.tree.map(jnp.add, accumulated, total)
        return intra_site_reduce_scatter(total, layouts, plan)
    shards = intra_site_reduce_scatter(total, layouts, plan)
    return jax.tree.map(jnp.add, accumulated, shards)


@jax.named_scope("reduce_gradients")
def start_grad_reduce(
    gradients: Any,
    error_feedback: Any,
    layouts: Any,
    plan: StepPlan,
    *,
    scattered: bool = False,
    own_stream: bool = False,
) -> GradReduce:
    """Sum gradients inside the site and encode what will cross.

    Args:
        gradients: this rank's, in the reduction dtype.
        error_feedback: this site's, from the step before; None: none is kept.
        layouts: the `LeafLayout` of each leaf.
        plan: how the step runs.
        scattered: the gradients are shards from `intra_site_reduce_scatter`.
        own_stream: on GPUs the sums in the site are on a stream that no other collective uses.
    """
    leaves, structure = jax.tree.flatten(gradients)
    leaf_layouts = tuple(jax.tree.leaves(layouts))
    # A stage without the leaf computed with zeros: what it made must not count in a sum over
    # stages, nor spoil the quantization blocks that it is in.
    leaves = [
        _zero_unless_held(leaf, layout)
        if plan.wire_format is not None or summed_over_stages(layout, plan)
        else leaf
        for leaf, layout in zip(leaves, leaf_layouts, strict=True)
    ]
    errors = None if error_feedback is None else jax.tree.leaves(error_feedback)
    sums: list[Reduction | list[jax.Array]] = []
    groups = group(
        _group_of(leaf, layout, plan) for leaf, layout in zip(leaves, leaf_layouts, strict=True)
    )
    for key, positions in groups.items():
        own = [leaf_layouts[i] for i in positions]
        before = None
        if errors is not None:
            before = [errors[i].reshape(_site_shard_shape(leaf_layouts[i])) for i in positions]
        own_leaves = [leaves[i] for i in positions]
        sums.append(_start(key, own_leaves, before, own, plan, scattered, own_stream))
    return GradReduce(
        tuple(sums),
        tuple(map(tuple, groups.values())),
        leaf_layouts,
        structure,
        plan.bucket_bytes,
        None if errors is None else tuple(error.shape for error in errors),
    )


class _Group(NamedTuple):
    """Leaves with the same values are reduced together, and can share buckets."""

    site_axes: tuple[str, ...] | None
    """The axes inside a site that shard the leaf; None: none do."""
    across_sites: bool
    """The leaf is sharded over `dc` too."""
    other_axes: tuple[str, ...]
    """The other axes inside a site over which the gradient is summed."""
    over_stages: bool
    """The gradient is summed over stages."""
    between_sites: tuple[str, ...]
    """The axes between sites over which it is summed."""


def summed_over_stages(layout: LeafLayout, plan: StepPlan) -> bool:
    """Return True if the gradient of a leaf is summed over the stages of a pipeline.

    Two stages make a part of it each; or one makes all of it, and all send their share over `dc`.
    """
    if layout.stages is None:
        return False
    crosses = plan.mesh.shape["dc"] > 1 and bool(plan.inter_axes)
    spread = crosses and layout.has_stage_dim and not shard_axes(layout)[1]
    return layout.stages.shared or spread


def axes_between_sites(layout: LeafLayout, plan: StepPlan) -> tuple[str, ...]:
    """Return the axes between sites over which the gradient of a leaf is summed.

    Where sites are stages, it is the gradient of a leaf that stages of several sites hold.
    """
    if plan.inter_axes or layout.stages is None or not summed_over_stages(layout, plan):
        return plan.inter_axes
    of_site = layout.stages.stages // plan.mesh.shape["dc"]
    holders = {stage // of_site for stage in layout.stages.holders}
    return ("dc",) if len(holders) > 1 else ()


def _group_of(gradient: jax.Array, layout: LeafLayout, plan: StepPlan) -> _Group:
    site_axes, across = shard_axes(layout)
    over_stages = summed_over_stages(layout, plan)
    excluded = {axis for sharding in layout.model_shards for axis in sharding.axes}
    excluded |= {"dc", *(site_axes or ())}
    if not over_stages:
        excluded |= set(plan.stage_axes)
    varying = varying_axes(gradient)
    other_axes = tuple(axis for axis in AXES if axis in varying and axis not in excluded)
    return _Group(site_axes, across, other_axes, over_stages, axes_between_sites(layout, plan))


def _start(
    key: _Group,
    leaves: list[jax.Array],
    errors: list[jax.Array] | None,
    layouts: list[LeafLayout],
    plan: StepPlan,
    scattered: bool,
    own_stream: bool,
) -> Reduction | list[jax.Array]:
    bucket_bytes = plan.bucket_bytes
    summed_over_others = any(plan.mesh.shape[axis] > 1 for axis in key.other_axes)
    only_scattered = key.site_axes is not None and not (
        key.across_sites or key.over_stages or summed_over_others
    )
    if (
        only_scattered and not scattered
    ):  # a bucket of the site's phase is one of the phase between sites
        return start_reduce_scatter(
            [
                drop_single(padded(leaf, layout), key.other_axes)
                for leaf, layout in zip(leaves, layouts, strict=True)
            ],
            key.site_axes or (),
            plan.inter_axes,
            dims=[shard_dim(layout) for layout in layouts],
            bucket_bytes=bucket_bytes,
            wire=plan.wire_format,
            error_feedback=errors,
            own_stream=own_stream,
        )
    shards = leaves
    if not scattered:
        shards = _scatter(key.site_axes, leaves, layouts, plan, own_stream=own_stream)
    if key.across_sites:
        assert errors is None, "shards across sites are summed without a wire format"
        return all_reduce(shards, key.other_axes, (), bucket_bytes=bucket_bytes)
    return start_all_reduce(
        shards,
        key.other_axes,
        key.between_sites,
        bucket_bytes=bucket_bytes,
        wire=plan.wire_format,
        error_feedback=errors,
        own_stream=own_stream,
    )


def _scatter(
    site_axes: tuple[str, ...] | None,
    leaves: list[jax.Array],
    layouts: list[LeafLayout],
    plan: StepPlan,
    *,
    own_stream: bool = False,
) -> list[jax.Array]:
    if site_axes is None:
        return leaves
    made: list[jax.Array] = start_reduce_scatter(
        [padded(leaf, layout) for leaf, layout in zip(leaves, layouts, strict=True)],
        site_axes,
        (),
        dims=[shard_dim(layout) for layout in layouts],
        bucket_bytes=plan.bucket_bytes,
        own_stream=own_stream,
    ).done()
    return made


def _zero_unless_held(leaf: jax.Array, layout: LeafLayout) -> jax.Array:
    """Return a stage's part of a leaf, zero where it holds none."""
    if layout.stages is None:
        return leaf
    return layout.stages.hold(leaf[None])[0] if layout.has_stage_dim else layout.stages.hold(leaf)


def _on_stage(leaf: jax.Array, layout: LeafLayout) -> jax.Array:
    """Return a reduced gradient as its weights lie between steps."""
    if layout.stages is None:
        return leaf
    value = _zero_unless_held(to_varying(leaf, layout.stages.axes), layout)
    return value[None] if layout.has_stage_dim else value


def padded(leaf: jax.Array, layout: LeafLayout) -> jax.Array:
    """Return a rank's part of a gradient, padded so that it divides into its shards."""
    missing = [(0, p - s) for p, s in zip(layout.model_shard_shape, leaf.shape, strict=True)]
    return jnp.pad(leaf, missing) if any(end for _, end in missing) else leaf


def _site_shard_shape(layout: LeafLayout) -> tuple[int, ...]:
    """Return the shape of a shard, and of its error, as they cross: without a stage dimension."""
    return layout.shard_shape[1:] if layout.has_stage_dim else layout.shard_shape
