"""What a training step sends, by formula: to plan with, and to compare with what a program holds.

With S bytes of a rank's parts in the dtype that is sent, n ranks that share them (ZeRO), o sites, c
ranks beside them that compute with the same parts (context; tensor, for leaves that its ranks hold
whole and make parts of the gradient of), L layers and m microbatches, a device sends in a step

    gather weights     stage 1, 2    (n - 1) / n S
                       stage 3       2 m + 1 / L times that for the layers; m + 1 / L if the
                                     gathered weights are kept
    scatter gradients  stage 1       (n - 1) / n S
                       stage 2, 3    m + 1 / L times that for the layers, m for the rest
    sum the shards                   2 (c - 1) / c S / n beside, 2 (o - 1) / o S / (n c) over dc

and stage 0 sums S over all n c ranks like shards. The 1 / L are the turn in which the software
pipeline of the layers fills or drains. Of kernels that travel as FP8 numbers S counts one byte a
number (`expected_weights`), and what FP8 recipes know of tensors is small and counted too
(`expected_statistics`). With the state sharded over sites too, each device sends
(o - 1) / o S / n of gradients and as much of weights over dc.

In a wire format 2 (o - 1) messages of a chunk's 1 / (n c o) cross dc instead of 2 (o - 1) / o S
(`geojax.collectives.exchange`), and error feedback gathers (c - 1) / c S / n more beside.

In a pipeline S is of a stage's layers, and what a loop holds counts in each of its ticks, as in
`geojax.hlo.traffic`: messages between stages, which travel whether or not anybody waits for
them, and what a chunk's forward and backward send, which a stage skips in ticks without work if the
program has branches. Over T ticks with forwards and backwards a device sends

    to the next stage             T stream      over the axes along which the two stages differ:
    to the stage before           T stream      stage, dc, or both
    in the model's parallelism    T / m times what the m microbatches would send through a chunk
"""

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.collectives import FLOAT32
from geojax.hlo.conventions import (
    all_reduce_bytes,
    permute_bytes,
    reduce_scatter_bytes,
)
from geojax.mesh import AXES, platform_of
from geojax.models import ModelConfig
from geojax.optim import SHARD_AXES, LeafLayout
from geojax.planner.traffic.collectives import expected_all_reduce
from geojax.planner.traffic.context import expected_context_bytes
from geojax.planner.traffic.moe import expected_mixture_bytes
from geojax.planner.traffic.sent import (
    Axes,
    Sent,
    add,
    layers_of_pass,
    long_axes,
    nothing,
    passes_of,
    ranks_of,
)
from geojax.planner.traffic.statistics import expected_statistics
from geojax.planner.traffic.tensor import expected_tensor_bytes
from geojax.planner.traffic.weights import expected_weights
from geojax.step.gather import computing_axes, shard_axes
from geojax.step.plan import StepPlan


def expected_step_bytes(
    model: ModelConfig,
    layouts: Any,
    plan: StepPlan,
    *,
    rows: int,
    sequence: int,
    scalars: int,
    signals: int,
) -> dict[Axes, Fraction]:
    """What one device sends in one step, but for a mixture's further exchanges.

    Args:
        model: the model.
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs.
        rows: of the global batch.
        sequence: columns of a row.
        scalars: the numbers, loss and targets among them, that are summed over the batch.
        signals: the numbers that are summed over all ranks.
    """
    total = nothing()
    for part in (
        expected_weights(model, layouts, plan),
        expected_statistics(model, layouts, plan),
        _gradients(model, layouts, plan),
        _activations(model, plan, rows=rows, sequence=sequence),
        _hops(model, plan, rows=rows, sequence=sequence),
        _numbers(layouts, plan, scalars, signals),
    ):
        add(total, part)
    return {axes: count for axes, count in total.items() if count}


def _gradients(model: ModelConfig, layouts: Any, plan: StepPlan) -> Sent:
    scatters = Fraction(1)
    rest = 1
    if plan.zero_stage >= 2:
        looped = plan.accumulation - (1 if plan.overlap else 0)
        fills = 1 if looped else 0
        scatters = Fraction(
            plan.accumulation * model.num_hidden_layers + fills, model.num_hidden_layers
        )
        rest = plan.accumulation
    sent = _times(lambda places: _scatter(places, plan), layouts, layers=scatters, rest=rest)
    if plan.overlap:
        together = plan.overlap_layers
        of_turn = jax.tree.map(lambda place: place.of_layers(together), layouts["layers"])
        for turn in range(model.num_hidden_layers // together):
            of_layers = jax.tree.leaves(of_turn)
            first = int(turn == 0)  # which puts away what nobody has sent
            add(sent, _sum_shards(of_layers, plan.one_message, scattered=True, idle=first))
        outer = {name: tree for name, tree in layouts.items() if name != "layers"}
        add(sent, _sum_shards(jax.tree.leaves(outer), plan, scattered=True))
    else:
        scattered = plan.zero_stage >= 2
        add(sent, _sum_shards(jax.tree.leaves(layouts), plan, scattered=scattered))
    return sent


def _times(function: Any, layouts: Any, *, layers: Fraction, rest: int) -> Sent:
    sent = nothing()
    for name, tree in layouts.items():
        factor = layers if name == "layers" else Fraction(rest)
        add(sent, function(jax.tree.leaves(tree)), factor)
    return sent


def _scatter(places: Iterable[LeafLayout], plan: StepPlan) -> Sent:
    sent = nothing()
    for place in places:
        site_axes, _ = shard_axes(place)
        if site_axes is not None:
            whole = math.prod(place.part_shape) * plan.policy.reduce_dtype.itemsize
            sent[long_axes(site_axes, plan)] += reduce_scatter_bytes(
                whole, ranks_of(site_axes, plan)
            )
    return sent


def _sum_shards(
    places: list[LeafLayout], plan: StepPlan, *, scattered: bool, idle: int = 0
) -> Sent:
    """Sums over the axes beside those of the shards, and over sites.

    Unless they are `scattered` before, shards that nobody else sums go on in the chunks that came.
    `idle` times the last phase, a gather in the site, is for nothing.
    """
    sent = nothing()
    groups: dict[Any, list[LeafLayout]] = {}
    for place in places:
        site_axes, across = shard_axes(place)
        cut = frozenset(axis for part in place.parts for axis in part.axes)
        key = (site_axes, across, _beside(place, plan), _shared(place), cut)
        groups.setdefault(key, []).append(place)
    for (site_axes, across, beside, shared, _), members in groups.items():
        sites = plan.mesh.shape["dc"] if plan.outer_axes or shared else 1
        shards = [_site_shard(place, site_axes, plan) for place in members]
        chunk_bytes = plan.chunk_bytes
        alone = site_axes is not None and not (across or shared or long_axes(beside, plan))
        if chunk_bytes is not None and alone and not scattered:
            chunk_bytes //= ranks_of(site_axes, plan)
        summed = expected_all_reduce(
            shards,
            inner_ranks=ranks_of(beside, plan),
            outer_ranks=1 if across else sites,
            chunk_bytes=chunk_bytes,
            wire=plan.wire,
            errors=plan.keeps_wire_errors,
        )
        # One phase in the site scatters; sums, and errors where they are kept, are gathered.
        gathers = 2 if plan.keeps_wire_errors else 1
        gathered = 0 if across or sites == 1 else summed.inner * Fraction(gathers, 1 + gathers)
        sent[long_axes(beside, plan)] += summed.inner + idle * gathered
        sent[long_axes(("dc",), plan)] += summed.outer
        if across:
            whole = sum(shard.size for shard in shards) * plan.policy.reduce_dtype.itemsize
            sent[long_axes(("dc",), plan)] += reduce_scatter_bytes(whole, sites)
    return sent


def _beside(place: LeafLayout, plan: StepPlan) -> Axes:
    """The axes of a site that a shard's gradient is summed over."""
    cut = {axis for part in place.parts for axis in part.axes} | {"dc"}
    cut |= set(shard_axes(place)[0] or ())
    computing = {*computing_axes(place, plan), *(plan.stage_axes if _shared(place) else ())}
    return tuple(axis for axis in AXES if axis in computing and axis not in cut)


def _shared(place: LeafLayout) -> bool:
    """Whether two stages of a pipeline make parts of the gradient."""
    return place.stages is not None and place.stages.shared


def _site_shard(place: LeafLayout, site_axes: Axes | None, plan: StepPlan) -> jax.ShapeDtypeStruct:
    shape = list(place.gathered_shape if site_axes is None else place.part_shape)
    if place.shard is not None:
        shape[place.shard.dim] //= ranks_of(site_axes or (), plan)
    return jax.ShapeDtypeStruct(tuple(shape), plan.policy.reduce_dtype)


def _activations(model: ModelConfig, plan: StepPlan, *, rows: int, sequence: int) -> Sent:
    """What the model's own parallelism sends, in all microbatches or ticks."""
    parallelism = plan.parallelism
    microbatch = _rows_of_microbatch(rows, plan)
    passes, layers = passes_of(plan), layers_of_pass(model, plan)
    model = model.model_copy(update={"layers": layers})
    tensor = expected_tensor_bytes(
        model,
        parallelism,
        rows=microbatch,
        columns=sequence // parallelism.context,
        dtype=plan.policy.compute_dtype,
        remat=plan.remat,
    )
    attention = expected_context_bytes(
        parallelism,
        rows=microbatch,
        sequence=sequence,
        heads=model.num_attention_heads // parallelism.tensor,
        key_heads=max(model.num_key_value_heads // parallelism.tensor, 1),
        head_size=model.head_dim,
        dtype=plan.policy.compute_dtype,
        packed=True,
    )
    forwards = 1 if plan.remat == "none" else 2
    context = model.num_hidden_layers * (forwards * attention.forward + attention.backward)
    sent = nothing()
    sent[long_axes(("tensor",), plan)] += tensor * passes
    sent[long_axes(("context",), plan)] += context * passes
    if not model.is_moe:
        return sent
    mixture = expected_mixture_bytes(
        model,
        parallelism,
        rows=microbatch,
        columns=sequence // parallelism.context,
        dtype=plan.policy.compute_dtype,
        remat=plan.remat,
        platform=platform_of(plan.mesh),
    )
    add(sent, mixture, Fraction(model.num_hidden_layers * passes))
    # The gradient of the balance, of which each rank weighs what it has of the row.
    wide = jnp.promote_types(plan.policy.compute_dtype, jnp.float32).itemsize
    weighed = all_reduce_bytes(microbatch * wide, parallelism.context)
    sent[long_axes(("context",), plan)] += weighed * passes
    return sent


def _hops(model: ModelConfig, plan: StepPlan, *, rows: int, sequence: int) -> Sent:
    """The messages between the stages of a pipeline."""
    sent = nothing()
    if plan.tick_program is None:
        return sent
    parallelism = plan.parallelism
    shares = parallelism.context * (parallelism.tensor if parallelism.sequence else 1)
    tokens = _rows_of_microbatch(rows, plan) * sequence // shares
    stream = tokens * model.hidden_size * plan.policy.compute_dtype.itemsize
    program = plan.tick_program
    for segment in program.segments:
        for number in segment.channels:
            pairs = program.channels[number].pairs
            for axes in {_crossed(source, target, plan) for source, target in pairs}:
                sent[axes] += permute_bytes(segment.count * stream, 2)
    return sent


def _crossed(source: int, target: int, plan: StepPlan) -> Axes:
    """The axes along which two stages differ."""
    sizes = [plan.mesh.shape[axis] for axis in plan.stage_axes]
    places = zip(
        plan.stage_axes,
        np.unravel_index(source, sizes),
        np.unravel_index(target, sizes),
        strict=True,
    )
    return long_axes((axis for axis, start, end in places if start != end), plan)


def _rows_of_microbatch(rows: int, plan: StepPlan) -> int:
    return rows // (ranks_of(plan.batch_axes, plan) * plan.accumulation)


def _numbers(layouts: Any, plan: StepPlan, scalars: int, signals: int) -> Sent:
    """Loss, targets and signals; and the norm of the gradient."""
    sent = nothing()

    def add_sum(axes: Axes, payload: int) -> None:
        in_site = long_axes((axis for axis in axes if axis != "dc"), plan)
        sent[in_site] += all_reduce_bytes(payload, ranks_of(in_site, plan))
        if "dc" in axes:
            sent[long_axes(("dc",), plan)] += all_reduce_bytes(payload, plan.mesh.shape["dc"])

    wide = jnp.promote_types(plan.policy.compute_dtype, jnp.float32)
    add_sum(("tensor",), signals * wide.itemsize)
    add_sum(("stage", *SHARD_AXES, "context"), (scalars + signals) * wide.itemsize)
    across = expected_all_reduce(
        jax.ShapeDtypeStruct((scalars + signals,), wide),
        inner_ranks=1,
        outer_ranks=plan.mesh.shape["dc"],
        wire=FLOAT32 if plan.wire is not None and wide == jnp.float32 else None,
    )
    sent[long_axes(("dc",), plan)] += across.outer
    norms = {
        frozenset(plan.stage_axes).union(*(cut.axes for cut in place.cuts))
        for place in jax.tree.leaves(layouts)
    }
    for axes in norms:
        add_sum(tuple(axes), plan.policy.reduce_dtype.itemsize)
    return sent
