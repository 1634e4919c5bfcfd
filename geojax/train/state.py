"""The training state: what a step reads and writes, and a checkpoint holds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from geojax.models import ModelConfig, init_parameters, parameter_shapes
from geojax.models.partition import partitions
from geojax.optim import layout
from geojax.optim.optimizer import optimizer_layouts
from geojax.train.plan import StepPlan
from geojax.train.stages import stage_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Master weights, optimizer state and counters; each a global, sharded array on the mesh."""

    step: Any
    """int32: steps done, skipped ones included; also the position in the data."""

    parameters: Any
    """Master weights, at least fp32: parts, sharded over (data, expert), padded, on the stages that
    use them."""

    optimizer: Any
    """The optax state; moments are sharded as their parameters are."""

    skipped: Any
    """int32: steps skipped so far because of a non-finite loss or gradient."""

    skipped_in_a_row: Any
    """int32: steps skipped since the last one that was applied."""


def parameter_layouts(model: ModelConfig, plan: StepPlan) -> Any:
    """The `LeafLayout` of each of the model's master weights."""
    stages = None
    if plan.staged_layers:
        stages = stage_rows(model, plan.staged_layers, plan.stage_axes)
    return layout.parameter_layouts(
        parameter_shapes(model, plan.policy.master_dtype),
        plan.mesh,
        partitions(model, plan.parallelism),
        sharded=plan.zero_stage > 0,
        across_sites=plan.shard_across_sites,
        stages=stages,
    )


def state_layouts(
    model: ModelConfig, optimizer: optax.GradientTransformation, plan: StepPlan
) -> TrainState:
    """The `LeafLayout` of every leaf of the state of `model`."""
    parameters = parameter_layouts(model, plan)
    count = layout.replicated(jax.ShapeDtypeStruct((), jnp.int32))
    return TrainState(
        step=count,
        parameters=parameters,
        optimizer=optimizer_layouts(optimizer, parameters),
        skipped=count,
        skipped_in_a_row=count,
    )


def initial_state(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    layouts: TrainState,
    mesh: Mesh,
    seed: int,
) -> TrainState:
    """The state before the first step: the same values on every mesh, made where they will live."""
    dtype = jax.tree.leaves(layouts.parameters)[0].dtype

    def make(key: jax.Array) -> TrainState:
        parameters = init_parameters(model, key, dtype)
        padded = jax.tree.map(lambda leaf, place: place.pad(leaf), parameters, layouts.parameters)
        return TrainState(
            step=jnp.int32(0),
            parameters=padded,
            optimizer=optimizer.init(padded),
            skipped=jnp.int32(0),
            skipped_in_a_row=jnp.int32(0),
        )

    compiled = jax.jit(make, out_shardings=layout.shardings(layouts, mesh))
    state: TrainState = compiled(jax.random.key(seed))
    return state
