"""The gradient of a step whose layers lie on pipeline stages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models import Batch, ModelConfig, Parameters
from geojax.models.chunk.remat import rematerialize
from geojax.models.layers import make_context
from geojax.models.moe import weighted_aux_loss
from geojax.models.transformer import embed, head_loss
from geojax.pipeline.execution import Executor, StageFunctions, StageWeights
from geojax.step.forward_backward import Gradients, TrainingPass
from geojax.step.plan import StepPlan
from geojax.step.weight_sources import stage_weights


def pipeline_gradients(
    shards: Parameters,
    microbatches: Batch,
    *,
    layouts: Parameters,
    model: ModelConfig,
    plan: StepPlan,
    dropout_key: jax.Array | None,
    gradient_factor: jax.Array | None,
    expected: Any,
) -> Gradients:
    """Loss and gradients of a step's microbatches, on this stage; nothing of them is reduced yet.

    Weights are gathered inside the site once a step, all of a stage's (ZeRO 0 or 1).

    Args:
        shards: this rank's shard of each parameter.
        microbatches: this rank's rows, [microbatch, rows, ...].
        layouts: the `LeafLayout` of each parameter.
        model: the model.
        plan: how the step runs.
        dropout_key: key of this step's dropout masks; None, no dropout.
        gradient_factor: what all gradients come out multiplied by; None: nothing.
        expected: magnitudes for each linear layer of this stage (see `geojax.step.amax_history`);
            what was seen instead is beside the gradients. None: none.
    """
    run = TrainingPass(model, plan, dropout_key, gradient_factor)
    made = _executor(run).gradients(_stage_weights(shards, layouts, run, expected), microbatches)
    outer = run.outer_gradients(made.weights.last, made.weights.first)
    targets = _on_last_stage(microbatches["loss_mask"].astype(made.loss.dtype).sum(), plan)
    return Gradients(made.loss, made.balance, targets, outer, made.weights.layers, [])


def pipeline_loss(
    shards: Parameters,
    microbatches: Batch,
    *,
    layouts: Parameters,
    model: ModelConfig,
    plan: StepPlan,
    expected: Any,
) -> tuple[jax.Array, jax.Array]:
    """The sum of the losses and the number of targets on the last stage, 0 elsewhere; no dropout.

    Arguments are those of `pipeline_gradients`.
    """
    run = TrainingPass(model, plan, None)
    loss = _executor(run).loss(_stage_weights(shards, layouts, run, expected), microbatches)
    return loss, _on_last_stage(microbatches["loss_mask"].astype(loss.dtype).sum(), plan)


def _executor(run: TrainingPass) -> Executor:
    plan = run.plan
    assert plan.staged_layers is not None, "there is a pipeline"
    assert plan.tick_program is not None, "which has a table"
    return Executor(
        plan.tick_program,
        stage_functions(run),
        plan.stage_axes,
        plan.staged_layers.layers_per_chunk,
        plan.policy.reduce_dtype,
    )


def _stage_weights(
    shards: Parameters, layouts: Parameters, run: TrainingPass, expected: Any
) -> StageWeights:
    weights = stage_weights(shards, layouts, run.plan, expected)
    last = {name: weights[name] for name in run.read_by_head}
    return StageWeights(weights["embedding"], weights["layers"], last)


def _on_last_stage(number: jax.Array, plan: StepPlan) -> jax.Array:
    assert plan.staged_layers is not None, "there is a pipeline"
    is_last = lax.axis_index(plan.stage_axes) == plan.staged_layers.last_stage
    return jnp.where(is_last, number, 0)


def stage_functions(run: TrainingPass) -> StageFunctions:
    """The pieces of a model for the executor."""
    model, plan = run.model, run.plan
    parallelism = plan.parallelism

    def weigh(balance: jax.Array, batch: Batch) -> jax.Array:
        return run.scaled(weighted_aux_loss(balance, batch["loss_mask"], model))

    return StageFunctions(
        embed=lambda first, batch: embed(first, batch, model, run.dropout_key, parallelism),
        context=functools.partial(
            make_context,
            config=model,
            dtype=plan.policy.compute_dtype,
            dropout_key=run.dropout_key,
            parallelism=parallelism,
        ),
        layer=rematerialize(run.layer, plan.remat),
        head=lambda last, x, batch: run.scaled(head_loss(last, x, batch, model, parallelism)),
        balance=weigh if model.is_moe else None,
    )
