"""The gradient of a step: microbatch after microbatch, then reduced; or, with overlap, as it comes.

microbatches 0 .. m-2    a loop; gradients are added on the device, whole (ZeRO 0 and 1) or as
                         shards of the site (ZeRO 2 and 3); nothing crosses `dc`
microbatch m-1           with overlap: a layer's gradient is reduced, over the sites too, while the
                         layers before it go backwards, which is a loop over layers and in no other;
                         otherwise one more turn of the loop over microbatches
then                     what is not reduced yet is
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models import Batch, ModelConfig, Parameters
from geojax.models.chunk.layer_scan import (
    StackedGradients,
    layer_slice,
)
from geojax.models.parallel.varying import vary_over, varying_axes, zeros_of
from geojax.precision import split_quantized
from geojax.step.amax_history import detach
from geojax.step.forward_backward import Gradients, TrainingPass
from geojax.step.grad_reduce import (
    inter_site_all_reduce,
    intra_site_reduce_scatter,
    reduce_gradients,
)
from geojax.step.grad_sinks import (
    OverlappedReduceSink,
    ScatteredGradients,
    WatchedGradients,
    WatchedSums,
    site_shards,
)
from geojax.step.pipelined_gradients import pipeline_gradients, pipeline_loss
from geojax.step.plan import StepPlan
from geojax.step.weight_sources import StepWeights, step_weights, without_layers


class StepGradients(NamedTuple):
    """What a step learns from its batch."""

    gradients: Parameters
    """Each rank's shards of the gradient of the sum over all ranks' losses, in the reduction dtype.
    (Not of the mean: that would weigh microbatches with few targets too much.)"""
    loss: jax.Array
    """The sum of the losses of this rank's tokens."""
    balance: jax.Array | None
    """What a mixture's balance adds to it; None for a dense model."""
    targets: jax.Array
    """The number of them that count."""
    seen: Any
    """The largest magnitudes of this rank (see `amax_history`); None: nobody looked."""
    wire_errors: Any
    """Those of this step (see `geojax.step.error_feedback`); None: none are kept."""


@jax.named_scope("step_gradients")
def step_gradients(
    shards: Parameters,
    batch: Batch,
    *,
    layouts: Parameters,
    model: ModelConfig,
    plan: StepPlan,
    dropout_key: jax.Array | None,
    gradient_factor: jax.Array | None = None,
    expected: Any = None,
    wire_errors: Any = None,
) -> StepGradients:
    """Loss and gradient of a global batch; call it inside the step's `shard_map`.

    Args:
        shards: this rank's shard of each parameter.
        batch: this rank's part of the global batch.
        layouts: the `LeafLayout` of each parameter.
        model: the model.
        plan: how the step runs.
        dropout_key: key of this step's dropout masks; None, no dropout.
        gradient_factor: what all gradients come out multiplied by; None: nothing.
        expected: magnitudes for each linear layer (see `geojax.step.amax_history`); None: none.
        wire_errors: this site's, from the step before, multiplied as gradients are; None: none.
    """
    microbatches = _microbatches(batch, plan)
    if plan.staged_layers is not None:
        staged = pipeline_gradients(
            shards,
            microbatches,
            layouts=layouts,
            model=model,
            plan=plan,
            dropout_key=dropout_key,
            gradient_factor=gradient_factor,
            expected=expected,
        )
        of_layers, seen = detach(staged.layers)
        whole = staged.outer | {"layers": of_layers}
        made = reduce_gradients(whole, wire_errors, layouts, plan)
        return StepGradients(made.gradients, *_numbers(staged), seen, made.error_feedback)
    run = TrainingPass(model, plan, dropout_key, gradient_factor)
    weights = step_weights(shards, layouts, model, plan, expected)
    outer, sources, ahead = weights
    of_outer = without_layers(layouts)
    scattered = plan.zero_stage >= 2
    in_loop = plan.microbatches - 1 if plan.overlap_grad_reduce else plan.microbatches
    sink: ScatteredGradients | StackedGradients = StackedGradients(
        plan.policy.reduce_dtype, once=in_loop == 1
    )
    if scattered:
        sink = ScatteredGradients(_of_layers(layouts, 1), plan)

    def in_site(gradient: Parameters) -> Parameters:
        return intra_site_reduce_scatter(gradient, of_outer, plan) if scattered else gradient

    def turn(sums: Gradients, microbatch: Batch) -> tuple[Gradients, None]:
        watched = WatchedGradients(sink)
        made = run.gradients(outer, sources, sums.ahead, watched, sums.layers, microbatch)
        loss, balance, targets = jax.tree.map(jnp.add, _numbers(sums), _numbers(made))
        total = jax.tree.map(jnp.add, sums.outer, in_site(made.outer))
        return Gradients(loss, balance, targets, total, made.layers, made.ahead), None

    dtype = plan.policy.reduce_dtype
    layer = jax.eval_shape(lambda: _trained_layer(weights))
    zero = vary_over(jnp.zeros((), run.loss_dtype), varying_axes(batch["loss_mask"]))
    outer_sums = zeros_of(jax.eval_shape(lambda: in_site(zeros_of(outer, dtype=dtype))))
    layer_sums = WatchedSums(sink.start(layer, model.num_hidden_layers), zeros_of(expected))
    balance = None if not model.is_moe else zero
    sums = Gradients(zero, balance, zero, outer_sums, layer_sums, ahead)
    if in_loop == 1:
        sums, _ = turn(sums, layer_slice(microbatches, 0))
    elif in_loop > 1:
        sums, _ = lax.scan(turn, sums, jax.tree.map(lambda leaf: leaf[:in_loop], microbatches))
    before = sums.outer | {"layers": sink.finish(sums.layers.weights)} if in_loop else None
    if not plan.overlap_grad_reduce:
        reduce = inter_site_all_reduce if scattered else reduce_gradients
        made = reduce(before, wire_errors, layouts, plan)
        return StepGradients(made.gradients, *_numbers(sums), sums.layers.seen, made.error_feedback)

    together = plan.bucket_layers
    last_sink = OverlappedReduceSink(
        _of_layers(layouts, together),
        plan,
        before and before["layers"],
        wire_errors and wire_errors["layers"],
    )
    last = run.gradients(
        outer,
        sources,
        sums.ahead,
        WatchedGradients(last_sink),
        WatchedSums(last_sink.start(layer, model.num_hidden_layers), sums.layers.seen),
        layer_slice(microbatches, in_loop),
        behind=sums.loss if in_loop else None,
        together=together,
    )
    reduced = last_sink.finish(last.layers.weights)
    outer_shards = {
        name: site_shards(before and before[name], gradient, layouts[name], plan)
        for name, gradient in last.outer.items()
    }
    outer_reduced = inter_site_all_reduce(
        outer_shards, wire_errors and without_layers(wire_errors), of_outer, plan
    )
    gradients = outer_reduced.gradients | {"layers": reduced.gradients}
    after = wire_errors and outer_reduced.error_feedback | {"layers": reduced.error_feedback}
    loss, balance, targets = jax.tree.map(jnp.add, _numbers(sums), _numbers(last))
    return StepGradients(gradients, loss, balance, targets, last.layers.seen, after)


def _microbatches(batch: Batch, plan: StepPlan) -> Batch:
    """[rows, ...] -> [microbatch, rows of one, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(plan.microbatches, -1, *leaf.shape[1:]), batch)


def _numbers(made: Gradients) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    return made.loss, made.balance, made.targets


def batch_loss(
    shards: Parameters,
    batch: Batch,
    *,
    layouts: Parameters,
    model: ModelConfig,
    plan: StepPlan,
    expected: Any,
) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses of this rank's tokens, without dropout, and the number that count."""
    if plan.staged_layers is not None:
        return pipeline_loss(
            shards,
            _microbatches(batch, plan),
            layouts=layouts,
            model=model,
            plan=plan,
            expected=expected,
        )
    weights = step_weights(shards, layouts, model, plan, expected)
    return TrainingPass(model, plan, None).loss(*weights, batch)


def _trained_layer(weights: StepWeights) -> Parameters:
    """What a gradient is taken of, of one layer."""
    zero = jnp.int32(0)
    layer, _ = weights.sources[0].take(weights.ahead[0], zero, zero)
    return detach(split_quantized(layer)[1])[0]


def _of_layers(layouts: Parameters, count: int) -> Parameters:
    """The layouts of `count` layers, stacked, out of all of them."""
    return jax.tree.map(lambda place: place.of_layers(count), layouts["layers"])
