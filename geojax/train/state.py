"""The training state: what a step reads and writes, and a checkpoint holds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from geojax.models import ModelConfig, init_parameters, parameter_shapes
from geojax.optim import layout
from geojax.optim.optimizer import optimizer_layouts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Master weights, optimizer state and counters; each a global, sharded array on the mesh."""

    step: Any
    """int32: steps done, skipped ones included; also the position in the data."""

    parameters: Any
    """Master weights, at least fp32, sharded over (data, expert) and padded."""

    optimizer: Any
    """The optax state; moments are sharded as their parameters are."""

    skipped: Any
    """int32: steps skipped so far because of a non-finite loss or gradient."""

    skipped_in_a_row: Any
    """int32: steps skipped since the last one that was applied."""


def state_layouts(
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, dtype: Any
) -> TrainState:
    """The `LeafLayout` of every leaf of the state of `model` on `mesh`, weights in `dtype`."""
    shapes = parameter_shapes(model)
    masters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    parameters = layout.parameter_layouts(masters, mesh)
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
