"""Predicted bytes and messages of the gradients' reduction, by formula.

The sums follow `geojax.step.grad_reduce`, bucket by bucket: leaves that are sharded alike are
reduced together, in the site first, then over sites.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax

from geojax.collectives.buckets import BlockLayout, plan_columns
from geojax.hlo.conventions import reduce_scatter_bytes
from geojax.mesh import AXES
from geojax.models import AnyModel
from geojax.optim.leaf_groups import shard_axes, shard_dim
from geojax.planner.traffic.by_axes import Axes, BytesByAxes, add, long_axes, no_bytes, ranks_of
from geojax.planner.traffic.collectives import PhaseBytes, predicted_all_reduce
from geojax.sharding import LeafLayout
from geojax.step.early_reduce import early_parts, pieces
from geojax.step.gather import computing_axes
from geojax.step.grad_reduce import axes_between_sites, message_plan, summed_over_stages
from geojax.step.plan import StepPlan


def predicted_gradient_bytes(model: AnyModel, layouts: Any, plan: StepPlan) -> BytesByAxes:
    """Predict the bytes that a device sends to reduce its gradients once a step."""
    scatters = Fraction(1)
    rest = 1
    if plan.layout.zero.stage >= 2:
        rest, layers = plan.layout.batch.microbatches, model.num_stacked_layers
        looped = rest - (1 if plan.overlap_grad_reduce else 0)
        scatters = Fraction(rest * layers + (1 if looped else 0), layers)
    sent = _times(lambda leaves: _scatter(leaves, plan), layouts, layers=scatters, rest=rest)
    if plan.overlap_grad_reduce and plan.staged_layers is not None:
        for part, leaves in _pipeline_parts(layouts, plan):
            add(sent, _sum_shards(leaves, part, scattered=False))
    elif plan.overlap_grad_reduce:
        bucket, non_layer = _overlapped(layouts, plan)
        for iteration in range(model.num_stacked_layers // plan.bucket_layers):
            idle = int(iteration == 0)  # nothing has arrived yet: it gathers zeros
            add(sent, _sum_shards(bucket, plan.one_message, scattered=True, idle=idle))
        add(sent, _sum_shards(non_layer, plan, scattered=True))
    else:
        scattered = plan.layout.zero.stage >= 2
        add(sent, _sum_shards(jax.tree.leaves(layouts), plan, scattered=scattered))
    return sent


class EarlyMessage(NamedTuple):
    """A part of a pipeline's gradients, sent beside the ticks that remain."""

    bytes: float
    ticks: int
    """Ticks of backwards until the next part is whole, or the pipeline is done."""
    site_bytes: float = 0.0
    """Bytes that the device sends in its site to scatter the part, before it crosses."""


@dataclasses.dataclass(frozen=True)
class GradientMessages:
    """The bytes of each sum over sites of a device's gradients, in the order of a step."""

    of_bucket: tuple[float, ...]
    """With `overlap_grad_reduce`: the messages of a bucket of layers, alike in all iterations."""
    iterations: int
    """The number of such buckets, each sent under the backward pass of the layers before it."""
    after_backward: tuple[float, ...]
    """The messages of all other gradients, which follow the backward pass."""
    early: tuple[EarlyMessage, ...] = ()
    """The parts that leave before the end in a pipeline with `overlap_grad_reduce`."""

    @property
    def each(self) -> tuple[float, ...]:
        """The bytes of every message of a step."""
        early = (message.bytes for message in self.early)
        return (*self.of_bucket * self.iterations, *early, *self.after_backward)

    @property
    def count(self) -> int:
        """The number of messages of a step."""
        return len(self.each)

    @property
    def bytes(self) -> float:
        """The bytes of all messages of a step."""
        return sum(self.each)

    @property
    def longest(self) -> float:
        """The bytes of the longest message."""
        return max(self.each, default=0.0)


def gradient_messages(model: AnyModel, layouts: Any, plan: StepPlan) -> GradientMessages:
    """Predict the messages over `dc` that reduce a device's gradients, once a step.

    Args:
        model: the model.
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs.
    """
    if not plan.overlap_grad_reduce:
        leaves, scattered = jax.tree.leaves(layouts), plan.layout.zero.stage >= 2
        return GradientMessages((), 0, _messages(leaves, plan, scattered=scattered))
    if plan.tick_program is not None:
        return _early_messages(layouts, plan, plan.tick_program.ticks.ticks)
    bucket, rest = _overlapped(layouts, plan)
    return GradientMessages(
        _messages(bucket, plan.one_message, scattered=True),
        model.num_stacked_layers // plan.bucket_layers,
        _messages(rest, plan, scattered=True),
    )


def _early_messages(layouts: Any, plan: StepPlan, ticks: int) -> GradientMessages:
    ready = early_parts(layouts, plan)
    ends = [*ready.values(), ticks - 1][1:]  # none where no part is early
    *parts, (rest, leaves) = _pipeline_parts(layouts, plan)
    early = tuple(
        EarlyMessage(
            sum(_messages(of_part, part, scattered=False)),
            end - tick,
            float(sum(_scatter(of_part, part).values())),
        )
        for (part, of_part), tick, end in zip(parts, ready.values(), ends, strict=True)
    )
    return GradientMessages((), 0, _messages(leaves, rest, scattered=False), early)


def _pipeline_parts(layouts: Any, plan: StepPlan) -> list[tuple[StepPlan, list[LeafLayout]]]:
    """Return what a pipeline with overlap reduces together, and how; the rest comes last."""
    return [
        (plan if part == "rest" else plan.one_message, jax.tree.leaves(leaves))
        for part, leaves in pieces(layouts, plan).items()
    ]


def _overlapped(layouts: Any, plan: StepPlan) -> tuple[list[LeafLayout], list[LeafLayout]]:
    """Return the leaves of a bucket of layers, and those in no layer."""
    bucket = jax.tree.map(lambda leaf: leaf.of_layers(plan.bucket_layers), layouts["layers"])
    rest = {name: tree for name, tree in layouts.items() if name != "layers"}
    return jax.tree.leaves(bucket), jax.tree.leaves(rest)


def _times(function: Any, layouts: Any, *, layers: Fraction, rest: int) -> BytesByAxes:
    sent = no_bytes()
    for name, tree in layouts.items():
        factor = layers if name == "layers" else Fraction(rest)
        add(sent, function(jax.tree.leaves(tree)), factor)
    return sent


def _scatter(leaves: Iterable[LeafLayout], plan: StepPlan) -> BytesByAxes:
    sent = no_bytes()
    for leaf in leaves:
        site_axes, _ = shard_axes(leaf)
        if site_axes is not None:
            unreduced_bytes = math.prod(leaf.model_shard_shape) * plan.policy.reduce_dtype.itemsize
            sent[long_axes(site_axes, plan)] += reduce_scatter_bytes(
                unreduced_bytes, ranks_of(site_axes, plan)
            )
    return sent


class _ShardSum(NamedTuple):
    """Shards that are summed together."""

    other_axes: Axes
    """The axes of a site that they are summed over, which shard nothing."""
    across: bool
    """The sum is sharded over sites."""
    long_axes: Axes
    """The axes that the shards vary over: those of one message have them in common."""
    sent: PhaseBytes


def _sum_shards(
    leaves: list[LeafLayout], plan: StepPlan, *, scattered: bool, idle: int = 0
) -> BytesByAxes:
    """Predict the sums over the other axes of a site and over sites.

    The last phase, a gather in the site, runs `idle` times more than it has results.
    """
    sent = no_bytes()
    for other_axes, across, _, summed in _shard_sums(leaves, plan, scattered=scattered):
        # One phase in the site scatters; sums, and errors where they are kept, are gathered.
        gathers = 2 if plan.keeps_error_feedback else 1
        gathered = summed.intra * Fraction(gathers, 1 + gathers)
        if across or not summed.messages:
            gathered = Fraction(0)
        sent[long_axes(other_axes, plan)] += summed.intra + idle * gathered
        sent[long_axes(("dc",), plan)] += summed.inter
    return sent


def _messages(leaves: list[LeafLayout], plan: StepPlan, *, scattered: bool) -> tuple[float, ...]:
    """Predict the messages over `dc`, in each of which short buckets share one."""
    alone: list[Fraction] = []
    sent, sizes, kinds = list[Fraction](), list[int](), list[Axes]()
    for summed in _shard_sums(leaves, plan, scattered=scattered):
        if summed.across:
            alone += summed.sent.messages
            continue
        sent += summed.sent.messages
        sizes += summed.sent.sizes
        kinds += [summed.long_axes] * len(summed.sent.sizes)
    joined = [sum(sent[i] for i in each) for each in message_plan(sizes, kinds, plan.bucket_bytes)]
    return tuple(float(message) for message in (*alone, *joined) if message)


def _shard_sums(
    leaves: list[LeafLayout], plan: StepPlan, *, scattered: bool
) -> Iterator[_ShardSum]:
    """Predict each sum over the other axes of a site and over sites.

    Shards that are summed over no further axis of the site keep the buckets of their
    reduce-scatter, unless they were `scattered` before.
    """
    groups: dict[Any, list[LeafLayout]] = {}
    for leaf in leaves:
        site_axes, across = shard_axes(leaf)
        sharded_axes = frozenset(axis for part in leaf.model_shards for axis in part.axes)
        over_stages = summed_over_stages(leaf, plan)
        between = axes_between_sites(leaf, plan)
        key = (site_axes, across, _other_axes(leaf, plan), over_stages, between, sharded_axes)
        groups.setdefault(key, []).append(leaf)
    for key, group in groups.items():
        site_axes, across, other_axes, over_stages, between, sharded_axes = key
        sites = ranks_of(between, plan)
        shards = [_site_shard(leaf, site_axes, plan) for leaf in group]
        bucket_bytes, scattered_over = plan.bucket_bytes, 1
        only_scattered = site_axes is not None and not (
            across or over_stages or long_axes(other_axes, plan)
        )
        if only_scattered and not scattered:
            scattered_over = ranks_of(site_axes or (), plan)
        if bucket_bytes is not None:
            bucket_bytes //= scattered_over
        summed = predicted_all_reduce(
            shards,
            intra_ranks=ranks_of(other_axes, plan),
            inter_ranks=1 if across else sites,
            bucket_bytes=bucket_bytes,
            wire=plan.wire_format,
            errors=plan.keeps_error_feedback,
        )
        if across:
            summed = PhaseBytes(summed.intra, _scatter_over_sites(group, shards, plan))
        sizes = tuple(scattered_over * size for size in summed.sizes)
        summed = dataclasses.replace(summed, sizes=sizes)
        varying = *plan.stage_axes, *sharded_axes, *(site_axes or ()), *other_axes
        yield _ShardSum(other_axes, across, long_axes(varying, plan), summed)


def _scatter_over_sites(
    leaves: list[LeafLayout], shards: list[jax.ShapeDtypeStruct], plan: StepPlan
) -> tuple[Fraction, ...]:
    """Predict the reduce-scatter over `dc` of a state that is sharded there too, by bucket."""
    sites, dtypes = plan.mesh.shape["dc"], [shard.dtype for shard in shards]
    blocks = [
        BlockLayout(shard.shape, shard_dim(leaf), sites)
        for leaf, shard in zip(leaves, shards, strict=True)
    ]
    return tuple(
        reduce_scatter_bytes(bucket.length * sites * plan.policy.reduce_dtype.itemsize, sites)
        for bucket in plan_columns(blocks, dtypes, dtypes, plan.bucket_bytes).buckets
    )


def _other_axes(leaf: LeafLayout, plan: StepPlan) -> Axes:
    """Return the axes of a site that a shard's gradient is summed over."""
    sharded_axes = {axis for part in leaf.model_shards for axis in part.axes} | {"dc"}
    sharded_axes |= set(shard_axes(leaf)[0] or ())
    stage_axes = plan.stage_axes if summed_over_stages(leaf, plan) else ()
    computing = {*computing_axes(leaf, plan), *stage_axes}
    return tuple(axis for axis in AXES if axis in computing and axis not in sharded_axes)


def _site_shard(leaf: LeafLayout, site_axes: Axes | None, plan: StepPlan) -> jax.ShapeDtypeStruct:
    shape = list(leaf.gathered_shape if site_axes is None else leaf.model_shard_shape)
    if leaf.shard is not None:
        shape[leaf.shard.dim] //= ranks_of(site_axes or (), plan)
    return jax.ShapeDtypeStruct(tuple(shape), plan.policy.reduce_dtype)
