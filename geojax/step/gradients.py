"""The gradient of a step: microbatch after microbatch, then reduced; or, with overlap, as it comes.

microbatches 0 .. m-2    a loop; gradients are added on the device, whole (ZeRO 0 and 1) or as
                         shards of the site (ZeRO 2 and 3); nothing crosses `dc`
microbatch m-1           with overlap: a layer's gradient is reduced, over the sites too, while the
                         layers before it go backwards, which is a loop over layers and in no other;
                         otherwise one more iteration of the loop over microbatches
then                     what is not reduced yet is

In a pipeline the executor runs all microbatches, and with overlap a chunk's gradients leave when
its last backward is done (`geojax.step.early_reduce`), and its weights come before its first
forward (`geojax.step.chunk_gather`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives import after, token_of
from geojax.collectives.axes import vary_over, varying_axes, zero_after, zeros_of
from geojax.models import AnyModel, Batch, Parameters
from geojax.models.chunk.layer_io import LayerWeights, StackedGradients, layer_slice
from geojax.models.frozen import trained_part
from geojax.precision import detach_amax
from geojax.step.chunk_gather import first_weights
from geojax.step.early_reduce import EarlyReduce
from geojax.step.forward_backward import ForwardBackward, Gradients, StageGradients
from geojax.step.gather import stage_weights, step_weights, without_layers
from geojax.step.grad_reduce import (
    accumulate_in_site,
    inter_site_all_reduce,
    intra_site_reduce_scatter,
    reduce_gradients,
)
from geojax.step.grad_sinks import AmaxSink, AmaxSums, OverlappedReduceSink, Zero2Sink
from geojax.step.plan import StepPlan

Sums: TypeAlias = tuple[jax.Array, jax.Array]
"""The sum of the tokens' losses, and the number of tokens that count."""


class StepGradients(NamedTuple):
    """Gradients and sums of a step's batch."""

    gradients: Parameters
    """Each rank's shards of the gradient of the sum over all ranks' losses, in the reduction dtype.
    (Not of the mean: that would weigh microbatches with few targets too much.)"""
    loss: jax.Array
    """The sum of the losses of this rank's tokens."""
    mtp_loss: jax.Array | None
    """The share of modules for later tokens in the loss; None for a model without any."""
    aux_loss: jax.Array | None
    """The sum of the aux losses of the experts' balance; None for a dense model."""
    targets: jax.Array
    """The number of tokens whose loss counts."""
    amax: Any
    """The amax of this rank (see `geojax.step.amax_history`); None: none is taken."""
    error_feedback: Any
    """Rounding errors of this step (see `geojax.step.error_feedback`); None: none are kept."""


@jax.named_scope("step_gradients")
def step_gradients(
    shards: Parameters,
    batch: Batch,
    *,
    layouts: Parameters,
    model: AnyModel,
    plan: StepPlan,
    dropout_key: jax.Array | None,
    gradient_factor: jax.Array | None = None,
    prev_amax: Any = None,
    error_feedback: Any = None,
) -> StepGradients:
    """Compute loss and gradient of a global batch; call it inside the step's `shard_map`.

    Args:
        shards: this rank's shard of each weight, frozen ones marked (`geojax.models.frozen`).
        batch: this rank's part of the global batch.
        layouts: the `LeafLayout` of each weight, in the same tree.
        model: the model.
        plan: how the step runs.
        dropout_key: key of this step's dropout masks; None, no dropout.
        gradient_factor: what all gradients come out multiplied by; None: nothing.
        prev_amax: that of each linear layer (see `geojax.step.amax_history`); None: none.
        error_feedback: this site's, from the step before, multiplied as gradients are; None: none.
    """
    microbatches = split_microbatches(batch, plan)
    run = ForwardBackward(model, plan, dropout_key, gradient_factor)
    weight_layouts, layouts = layouts, trained_part(layouts)
    if plan.staged_layers is not None:
        late = None
        if plan.overlap_param_gather:
            weights, late = first_weights(shards, weight_layouts, plan, prev_amax)
        else:
            weights = stage_weights(shards, weight_layouts, plan, prev_amax)
        early = EarlyReduce(layouts, plan, error_feedback, run.stage_parameters)
        staged = run.pipeline_gradients(
            weights, microbatches, early if plan.overlap_grad_reduce else None, late
        )
        if plan.overlap_grad_reduce:
            made = early.finish(staged.exchanged, staged.sums)
        else:
            gradients = run.stage_parameters(staged.sums)
            made = reduce_gradients(gradients, error_feedback, layouts, plan)
        amax = detach_amax(staged.sums.layers)[1]
        return StepGradients(made.gradients, *_numbers(staged), amax, made.error_feedback)
    non_layer_params, layers, zero = step_weights(shards, weight_layouts, model, plan, prev_amax)
    non_layer_layouts = without_layers(layouts)
    scattered = plan.layout.zero.stage >= 2
    in_loop = plan.layout.batch.microbatches
    if plan.overlap_grad_reduce:  # the last microbatch has a loop of its own
        in_loop -= 1
    sink: Zero2Sink | StackedGradients = StackedGradients(
        plan.policy.reduce_dtype, once=in_loop == 1
    )
    if scattered:
        sink = Zero2Sink(_of_layers(layouts, 1), plan)

    def in_site(gradient: Parameters) -> Parameters:
        if not scattered:
            return gradient
        return intra_site_reduce_scatter(gradient, non_layer_layouts, plan)

    def continued(sums: Gradients) -> list[LayerWeights]:
        prefetched = zip(layers, sums.prefetched, strict=True)
        return [own._replace(prefetched=following) for own, following in prefetched]

    def iteration(sums: Gradients, microbatch: Batch) -> tuple[Gradients, None]:
        watched = AmaxSink(sink)
        made = run.gradients(non_layer_params, continued(sums), microbatch, watched, sums.layers)
        numbers = _Numbers(*jax.tree.map(jnp.add, _numbers(sums), _numbers(made)))
        total = jax.tree.map(jnp.add, sums.non_layer_params, in_site(made.non_layer_params))
        return Gradients(*numbers, total, made.layers, made.prefetched), None

    layer = jax.eval_shape(lambda: trained_layer(layers[0]))
    no_loss = vary_over(jnp.zeros((), run.loss_dtype), varying_axes(batch["loss_mask"]))
    non_layer_zeros = functools.partial(
        zeros_of, trained_part(non_layer_params), dtype=plan.policy.reduce_dtype
    )
    non_layer_sums = zeros_of(jax.eval_shape(lambda: in_site(non_layer_zeros())), zero=zero)
    layer_sums = AmaxSums(sink.start(layer, model.num_stacked_layers, zero), zeros_of(prev_amax))
    mtp_loss = no_loss if model.num_nextn_predict_layers else None
    aux_loss = no_loss if model.is_moe else None
    prefetched = [own.prefetched for own in layers]
    numbers = _Numbers(no_loss, mtp_loss, aux_loss, no_loss)
    sums = Gradients(*numbers, non_layer_sums, layer_sums, prefetched)
    if in_loop == 1:
        sums, _ = iteration(sums, layer_slice(microbatches, 0))
    elif in_loop > 1:
        sums, _ = lax.scan(iteration, sums, jax.tree.map(lambda leaf: leaf[:in_loop], microbatches))
    if in_loop:
        sums, zero = zero_after(sums)
    before = None
    if in_loop:
        before = sums.non_layer_params | {"layers": sink.finish(sums.layers.weights)}
    if not plan.overlap_grad_reduce:
        reduce = inter_site_all_reduce if scattered else reduce_gradients
        made = reduce(before, error_feedback, layouts, plan)
        return StepGradients(made.gradients, *_numbers(sums), sums.layers.amax, made.error_feedback)

    last_sink = OverlappedReduceSink(
        _of_layers(layouts, plan.bucket_layers),
        plan,
        before and before["layers"],
        error_feedback and error_feedback["layers"],
    )
    done = after(sums.loss, token_of((sums.loss, sums.non_layer_params))) if in_loop else None
    last = run.gradients(
        non_layer_params,
        continued(sums),
        layer_slice(microbatches, in_loop),
        AmaxSink(last_sink),
        AmaxSums(last_sink.start(layer, model.num_stacked_layers, zero), sums.layers.amax),
        after_result=done,
        bucket_layers=plan.bucket_layers,
    )
    reduced = last_sink.finish(last.layers.weights)
    non_layer_shards = {
        name: accumulate_in_site(before and before[name], gradient, layouts[name], plan)
        for name, gradient in last.non_layer_params.items()
    }
    non_layer_reduced = inter_site_all_reduce(
        non_layer_shards, error_feedback and without_layers(error_feedback), non_layer_layouts, plan
    )
    gradients = non_layer_reduced.gradients | {"layers": reduced.gradients}
    of_layers = {"layers": reduced.error_feedback}
    errors = error_feedback and non_layer_reduced.error_feedback | of_layers
    numbers = _Numbers(*jax.tree.map(jnp.add, _numbers(sums), _numbers(last)))
    return StepGradients(gradients, *numbers, last.layers.amax, errors)


def split_microbatches(batch: Batch, plan: StepPlan) -> Batch:
    """Reshape a batch [B, ...] to [M, B / M, ...]."""
    count = plan.layout.batch.microbatches
    return jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)


class _Numbers(NamedTuple):
    loss: jax.Array
    mtp_loss: jax.Array | None
    aux_loss: jax.Array | None
    targets: jax.Array


def _numbers(made: Gradients | StageGradients) -> _Numbers:
    return _Numbers(made.loss, made.mtp_loss, made.aux_loss, made.targets)


def batch_loss(
    shards: Parameters,
    batch: Batch,
    *,
    layouts: Parameters,
    model: AnyModel,
    plan: StepPlan,
    prev_amax: Any,
) -> Sums:
    """Sum the losses of this rank's tokens, without dropout, and the tokens that count.

    It goes by microbatches as the step does, so that it needs no more memory than the step.
    """
    plan = dataclasses.replace(plan, layout=plan.layout.changed(scan_layers=True))
    run = ForwardBackward(model, plan, None)
    microbatches = split_microbatches(batch, plan)
    if plan.staged_layers is not None:
        stage = stage_weights(shards, layouts, plan, prev_amax)
        return run.pipeline_loss(stage, microbatches)
    weights = step_weights(shards, layouts, model, plan, prev_amax)

    def iteration(sums: Sums, microbatch: Batch) -> tuple[Sums, None]:
        made = run.loss(weights.non_layer_params, weights.layers, microbatch)
        return jax.tree.map(jnp.add, sums, made), None

    zero = vary_over(jnp.zeros((), run.loss_dtype), varying_axes(batch["loss_mask"]))
    sums, _ = lax.scan(iteration, (zero, zero), microbatches)
    return sums


def trained_layer(weights: LayerWeights) -> Parameters:
    """Return one layer's weights, of which gradients are taken."""
    zero = jnp.int32(0)
    layer, _ = weights.source.take(weights.prefetched, zero, zero)
    return detach_amax(trained_part(layer))[0]


def _of_layers(layouts: Parameters, count: int) -> Parameters:
    """Lay out `count` stacked layers as all of them are."""
    return jax.tree.map(lambda leaf_layout: leaf_layout.of_layers(count), layouts["layers"])
