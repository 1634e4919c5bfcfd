"""The compiled programs of one runtime: the training step and the validation pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.models import AnyModel
from geojax.sharding import leaf_layouts
from geojax.step.amax_history import prev_amax
from geojax.step.gradients import batch_loss
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.state import TrainState
from geojax.step.update import sum_in_site, sum_scalars_over_sites, train_step

STEP_NAME = train_step.__name__
"""The name of the compiled step, in profiles and in the count of compilations."""


def trace_step(
    layouts: TrainState,
    model: AnyModel,
    plan: StepPlan,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: optax.Schedule,
    batch: Any,
) -> jax.stages.Traced:
    """Trace the step `(state, batch, signals, seed) -> (state, metrics)`.

    The state is donated. Compiled for these shapes, it refuses others and never recompiles.

    Args:
        layouts: from `state_layouts`.
        model: the model.
        plan: how the step runs.
        optimizer: the optax chain that runs on shards.
        schedule: learning rate by update, for the metrics.
        batch: the global batch as `jax.ShapeDtypeStruct`s, without shardings.
    """
    specs = jax.tree.map(lambda leaf_layout: leaf_layout.spec(), layouts)

    step = functools.partial(
        train_step,
        layouts=layouts,
        model=model,
        plan=plan,
        optimizer=optimizer,
        schedule=schedule,
    )
    program = jax.shard_map(
        step,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan), plan.signal_spec, PartitionSpec()),
        out_specs=(specs, PartitionSpec()),
        check_vma=True,
    )
    arguments = (
        leaf_layouts.abstract(layouts, plan.mesh),
        batch_on_mesh(batch, plan),
        signals_on_mesh(plan),
        jax.ShapeDtypeStruct((), jnp.uint32, sharding=NamedSharding(plan.mesh, PartitionSpec())),
    )
    return jax.jit(program, donate_argnums=0).trace(*arguments)


def lower_step(*arguments: Any) -> jax.stages.Lowered:
    """Lower the step for the mesh's devices; arguments are those of `trace_step`."""
    return trace_step(*arguments).lower()


def trace_evaluation(
    layouts: TrainState, model: AnyModel, plan: StepPlan, batch: Any
) -> jax.stages.Traced:
    """Trace the validation pass: `(state, batch) -> [sum of losses, number of targets]`.

    Arguments are those of `trace_step`.
    """
    specs = jax.tree.map(lambda leaf_layout: leaf_layout.spec(), layouts)

    @jax.named_scope("evaluation")
    def evaluate(state: TrainState, sequences: Any) -> jax.Array:
        sums = batch_loss(
            state.evaluated_weights,
            sequences,
            layouts=layouts.weights,
            model=model,
            plan=plan,
            prev_amax=prev_amax(state.amax_history, plan),
        )
        return sum_scalars_over_sites(sum_in_site(jnp.stack(sums)), plan)

    program = jax.shard_map(
        evaluate,
        mesh=plan.mesh,
        in_specs=(specs, batch_specs(batch, plan)),
        out_specs=PartitionSpec(),
        check_vma=True,
    )
    arguments = (leaf_layouts.abstract(layouts, plan.mesh), batch_on_mesh(batch, plan))
    return jax.jit(program).trace(*arguments)


def batch_shape(sequences: int, sequence_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape the global batch of `geojax.data`: arrays [B, S] and [B]."""
    tokens = jax.ShapeDtypeStruct((sequences, sequence_length), jnp.int32)
    return {
        "tokens": tokens,
        "targets": tokens,
        "loss_mask": jax.ShapeDtypeStruct((sequences, sequence_length), jnp.float32),
        "segment_ids": tokens,
        "positions": tokens,
        "row": jax.ShapeDtypeStruct((sequences,), jnp.int32),
    }


def batch_specs(batch: Any, plan: StepPlan) -> Any:
    """Choose the sharding of each array of a batch: [B, S] or [B]."""
    return jax.tree.map(
        lambda leaf: plan.token_spec if len(leaf.shape) > 1 else plan.sequence_spec, batch
    )


def batch_on_mesh(batch: Any, plan: StepPlan) -> Any:
    """Give the shapes of a batch their shardings."""
    return jax.tree.map(
        lambda leaf, spec: _on_mesh(leaf, spec, plan.mesh), batch, batch_specs(batch, plan)
    )


def signals_on_mesh(plan: StepPlan) -> jax.ShapeDtypeStruct:
    """Shape and shard the signals of all ranks, [ranks, len(SIGNALS)]."""
    shape = jax.ShapeDtypeStruct((plan.mesh.size, len(SIGNALS)), jnp.float32)
    return _on_mesh(shape, plan.signal_spec, plan.mesh)


def _on_mesh(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
