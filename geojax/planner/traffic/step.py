"""Predicted bytes of a training step, by formula.

S is the bytes of a rank's parts in the dtype that is sent. n ranks share the parts (ZeRO), in each
of o sites. c other ranks of the site compute with the same parts: ranks of context, and ranks of
tensor for leaves that tensor does not shard. With L layers and m microbatches, a device sends in a
step

    gather weights     stage 1, 2    (n - 1) / n S
                       stage 3       2 m + 1 / L times that for the layers; m + 1 / L if the
                                     gathered weights are kept
    scatter gradients  stage 1       (n - 1) / n S
                       stage 2, 3    m + 1 / L times that for the layers, m for the rest
    sum the shards                   2 (c - 1) / c S / n in a site, 2 (o - 1) / o S / (n c) over dc

and stage 0 sums S over all n c ranks like shards. The 1 / L are the iteration in which the
software pipeline of the layers fills or drains. Of kernels that travel as FP8 numbers S counts one
byte a number (`predicted_weight_bytes`), and the amax of FP8 tensors are small and counted too
(`predicted_amax_bytes`), and so are the statistics of an optimizer (`predicted_optimizer_bytes`).
With the state sharded over sites too, each device sends (o - 1) / o S / n
of gradients and as much of weights over dc.

In a wire format 2 (o - 1) messages of a bucket's 1 / (n c o) cross dc instead of 2 (o - 1) / o S
(`geojax.collectives.exchange`), and error feedback gathers (c - 1) / c S / n more in the site.

In a pipeline S counts a stage's layers, and the collectives of a loop count in each tick, as in
`geojax.hlo.traffic`. Messages between stages travel in ticks without work too. A program with
branches skips a chunk's collectives in ticks without work. Over T ticks with forwards and backwards
a device sends

    to the next stage             T stream      over the axes along which the two stages differ:
    to the stage before           T stream      stage, dc, or both
    in the model's parallelism    T / m times what the m microbatches would send through a chunk
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.collectives import FLOAT32
from geojax.hlo.conventions import (
    all_reduce_bytes,
    permute_bytes,
)
from geojax.models import ModelConfig
from geojax.models.chunk.remat import Remat
from geojax.models.frozen import trained_part
from geojax.models.parameters import is_score_bias
from geojax.optim import SHARD_AXES, OptimizerSettings
from geojax.planner.traffic.amax import predicted_amax_bytes
from geojax.planner.traffic.by_axes import (
    Axes,
    BytesByAxes,
    PredictedTraffic,
    add,
    layers_of_pass,
    long_axes,
    no_bytes,
    passes_of,
    ranks_of,
)
from geojax.planner.traffic.collectives import predicted_all_reduce
from geojax.planner.traffic.context import predicted_context_bytes
from geojax.planner.traffic.gradients import predicted_gradient_bytes
from geojax.planner.traffic.moe import predicted_moe_bytes
from geojax.planner.traffic.optimizer import predicted_optimizer_bytes
from geojax.planner.traffic.tensor import predicted_tensor_bytes
from geojax.planner.traffic.weights import predicted_weight_bytes
from geojax.runtime.platform import platform_of
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.state import parameter_layouts


def predicted_step_bytes(
    model: ModelConfig,
    plan: StepPlan,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    optimizer: OptimizerSettings | None = None,
    *,
    further_exchanges: bool = False,
) -> PredictedTraffic:
    """Predict the bytes that one device sends in one step over each set of mesh axes.

    Exact, padding included, but for a mixture of experts: tokens beyond its windows are exchanged
    further, which depends on the data. A program's text has all exchanges that it can need.

    Args:
        model: the model.
        plan: how the step runs.
        batch: the global batch as shapes, from `geojax.step.program.batch_shape`.
        optimizer: the optimizer; None: one that needs no statistics of other shards.
        further_exchanges: count all further exchanges of experts' tokens; otherwise none.
    """
    layouts = parameter_layouts(model, plan)
    sequences, length = batch["tokens"].shape
    sent = predicted_update_bytes(model, layouts, plan)
    if optimizer is not None:
        add(sent, predicted_optimizer_bytes(optimizer, trained_part(layouts), plan))
    add(sent, predicted_amax_bytes(model, layouts, plan))
    add(sent, _activations(model, plan, sequences, length, further_exchanges=further_exchanges))
    add(sent, _metrics(model, plan))
    total = no_bytes()
    add(total, sent, plan.mesh.size)
    for axes, count, senders in _hops(model, plan, sequences, length):
        sent[axes] += count
        total[axes] += count * senders
    used = [axes for axes in sent if sent[axes]]
    return PredictedTraffic(
        {axes: sent[axes] for axes in used}, {axes: total[axes] for axes in used}
    )


def predicted_update_bytes(model: ModelConfig, layouts: Any, plan: StepPlan) -> BytesByAxes:
    """Predict the bytes to gather weights, reduce gradients and take the gradient's norm.

    Args:
        model: the model.
        layouts: the `LeafLayout` of each weight, frozen ones marked.
        plan: how the step runs.
    """
    total = predicted_weight_bytes(model, layouts, plan)
    add(total, predicted_gradient_bytes(model, trained_part(layouts), plan))
    add(total, _norm(trained_part(layouts), plan))
    return total


def _activations(
    model: ModelConfig, plan: StepPlan, sequences: int, length: int, *, further_exchanges: bool
) -> BytesByAxes:
    """Predict the tensor, context and expert traffic of all microbatches or ticks."""
    parallelism = plan.parallelism
    microbatch = _sequences_of_microbatch(sequences, plan)
    passes, layers = passes_of(plan), layers_of_pass(model, plan)
    split = plan.tick_program is not None and plan.tick_program.ticks.schedule.split_backward
    model = model.with_stacked_layers(layers)
    tensor = predicted_tensor_bytes(
        model,
        parallelism,
        sequences=microbatch,
        positions=length // parallelism.context,
        dtype=plan.policy.compute_dtype,
        remat=plan.layout.remat,
        split_backward=split,
        in_pipeline=plan.staged_layers is not None,
    )
    attention = predicted_context_bytes(
        parallelism,
        sequences=microbatch,
        sequence_length=length,
        heads=model.num_attention_heads // parallelism.tensor,
        kv_heads=max(model.num_key_value_heads // parallelism.tensor, 1),
        head_dim=model.head_dim,
        value_dim=model.v_head_dim,
        dtype=plan.policy.compute_dtype,
        packed=True,
    )
    forwards = 1 if plan.layout.remat == "none" else 2
    context = model.num_stacked_layers * (forwards * attention.forward + attention.backward)
    if dense := model.first_k_dense_replace:
        again = dense - 1 if plan.staged_layers is not None else 0
        context += (2 * dense + again) * attention.forward + dense * attention.backward
    sent = no_bytes()
    sent[long_axes(("tensor",), plan)] += tensor * passes
    sent[long_axes(("context",), plan)] += context * passes
    if not model.is_moe:
        return sent

    def moe(remat: Remat, *, split_backward: bool) -> Mapping[Axes, Fraction]:
        return predicted_moe_bytes(
            model,
            parallelism,
            sequences=microbatch,
            positions=length // parallelism.context,
            dtype=plan.policy.compute_dtype,
            remat=remat,
            platform=platform_of(plan.mesh),
            split_backward=split_backward,
            further_exchanges=further_exchanges,
        )

    add(
        sent,
        moe(plan.layout.remat, split_backward=split),
        Fraction(model.num_stacked_layers * passes),
    )
    modules = Fraction(model.num_nextn_predict_layers * passes)
    add(sent, moe("full", split_backward=False), modules)
    # The gradient of the aux loss: each rank weighs its part of a sequence.
    wide = jnp.promote_types(plan.policy.compute_dtype, jnp.float32).itemsize
    weighed = all_reduce_bytes(microbatch * wide, parallelism.context)
    sent[long_axes(("context",), plan)] += weighed * passes
    return sent


def _hops(
    model: ModelConfig, plan: StepPlan, sequences: int, length: int
) -> Iterator[tuple[Axes, Fraction, int]]:
    """Predict the messages between the stages of a pipeline: axes, a sender's bytes, senders."""
    if plan.tick_program is None:
        return
    parallelism = plan.parallelism
    shares = parallelism.context * (parallelism.tensor if parallelism.sequence else 1)
    tokens = _sequences_of_microbatch(sequences, plan) * length // shares
    message = tokens * model.hidden_size * plan.policy.compute_dtype.itemsize
    program = plan.tick_program
    forms = (form for segment in program.segments for _, form in segment.ticks())
    for form, ticks in collections.Counter(forms).items():
        for number in form.channels:
            pairs = program.channels[number].pairs
            stages = collections.Counter(_crossed(*pair, plan) for pair in pairs)
            for axes, count in stages.items():
                sent = permute_bytes(ticks * message, 2)
                yield axes, sent, count * plan.mesh.size // ranks_of(plan.stage_axes, plan)


def _crossed(source: int, target: int, plan: StepPlan) -> Axes:
    """Return the axes along which two stages differ."""
    sizes = [plan.mesh.shape[axis] for axis in plan.stage_axes]
    coordinates = zip(
        plan.stage_axes,
        np.unravel_index(source, sizes),
        np.unravel_index(target, sizes),
        strict=True,
    )
    return long_axes((axis for axis, start, end in coordinates if start != end), plan)


def _sequences_of_microbatch(sequences: int, plan: StepPlan) -> int:
    return sequences // (ranks_of(plan.batch_axes, plan) * plan.layout.batch.microbatches)


def _norm(layouts: Any, plan: StepPlan) -> BytesByAxes:
    """Predict the sums that make the norm of the gradient: one for each way to shard a leaf."""
    sent = no_bytes()
    shardings = {
        frozenset(plan.stage_axes).union(*(sharding.axes for sharding in leaf.dim_shardings))
        for path, leaf in jax.tree_util.tree_leaves_with_path(layouts)
        if not is_score_bias(path)
    }
    for axes in shardings:
        add(sent, _sum_over(axes, plan.policy.reduce_dtype.itemsize, plan))
    return sent


def _metrics(model: ModelConfig, plan: StepPlan) -> BytesByAxes:
    """Predict the sums of loss, targets, signals, and of loss for later tokens and aux loss."""
    sent = no_bytes()
    scalars = 2 + len(SIGNALS) + (model.num_nextn_predict_layers > 0) + model.is_moe
    wide = jnp.promote_types(plan.policy.compute_dtype, jnp.float32)
    add(sent, _sum_over(("tensor",), len(SIGNALS) * wide.itemsize, plan))
    in_site = ("stage", *SHARD_AXES, "context")
    add(sent, _sum_over(in_site, scalars * wide.itemsize, plan))
    across = predicted_all_reduce(
        jax.ShapeDtypeStruct((scalars,), wide),
        intra_ranks=1,
        inter_ranks=plan.mesh.shape["dc"],
        wire=FLOAT32 if plan.wire_format is not None and wide == jnp.float32 else None,
    )
    sent[long_axes(("dc",), plan)] += across.inter
    return sent


def _sum_over(axes: Iterable[str], payload: int, plan: StepPlan) -> BytesByAxes:
    """Predict an all-reduce of `payload` bytes inside the site, and over `dc` if it is an axis."""
    sent = no_bytes()
    in_site = long_axes((axis for axis in axes if axis != "dc"), plan)
    sent[in_site] += all_reduce_bytes(payload, ranks_of(in_site, plan))
    if "dc" in axes:
        sent[long_axes(("dc",), plan)] += all_reduce_bytes(payload, plan.mesh.shape["dc"])
    return sent
