"""The same step as plain `jax.jit` over sharded arrays: XLA places the collectives."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from geojax.models import init_parameters
from geojax.models.declaration import kind_by_name
from geojax.optim.optimizer import decay_weights
from geojax.step.plan import StepPlan
from geojax.step.state import parameter_layouts
from layout_sides.automatic_model import PIECES, AutomaticModel
from layout_sides.work import MODEL, SCHEDULE, SEED, SETTINGS, host_batch


def automatic_side(plan: StepPlan) -> tuple[jax.stages.Compiled, Any, Callable[[Any], Any]]:
    """The compiled step, its first state, and what takes a step: state to (state, loss)."""
    layouts = parameter_layouts(MODEL, plan)
    for layout in jax.tree.leaves(layouts):
        assert layout.padded_shape == layout.shape, "XLA does not pad arrays that are arguments"
    state_specs = jax.tree.map(lambda layout: layout.spec(), layouts)
    compute_specs = jax.tree.map(
        lambda layout: dataclasses.replace(layout, shard=None).spec(), layouts
    )
    model = AutomaticModel(MODEL, plan, compute_specs, state_specs)
    optimizer = optax.chain(
        optax.clip_by_global_norm(SETTINGS.clip_norm),
        optax.scale_by_adam(SETTINGS.beta1, SETTINGS.beta2, SETTINGS.epsilon),
        decay_weights(lambda name: SETTINGS.of_leaf(name, kind_by_name(name)).weight_decay),
        optax.scale_by_learning_rate(lambda count: SCHEDULE(count + 1)),
    )

    def place(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(plan.mesh, spec)

    def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        parameters, moments = state
        gathered = _constrained(
            parameters, state_specs if plan.layout.zero.stage == 3 else compute_specs, place
        )
        gradients, loss, count = _gradients(model, gathered, batch)
        mean = jax.tree.map(lambda leaf: leaf / count, gradients)
        mean = _constrained(mean, state_specs, place)
        updates, moments = optimizer.update(mean, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), loss / count

    def initial(key: jax.Array) -> Any:
        parameters = init_parameters(MODEL, key, jnp.float32)
        return parameters, optimizer.init(parameters)

    key = jax.random.key(SEED)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, spec: place(spec),
        jax.eval_shape(initial, key)[1],
        state_specs,
        transform_non_params=lambda _: place(PartitionSpec()),
    )
    places = jax.tree.map(place, state_specs), moments
    state = jax.jit(initial, out_shardings=places)(key)
    batch = jax.device_put(model.pieces(host_batch()), place(PartitionSpec(None, PIECES)))
    program = (
        jax.jit(train_step, donate_argnums=0, out_shardings=(places, place(PartitionSpec())))
        .lower(state, batch)
        .compile()
    )
    return program, state, lambda state: program(state, batch)


def _gradients(
    model: AutomaticModel, parameters: Any, microbatches: Any
) -> tuple[Any, jax.Array, jax.Array]:
    """Sums over all microbatches of gradient, loss and targets."""

    def one(microbatch: Any) -> tuple[Any, jax.Array, jax.Array]:
        (loss, count), gradients = jax.value_and_grad(model.loss_sum, has_aux=True)(
            parameters, microbatch
        )
        return gradients, loss, count

    if model.plan.layout.batch.microbatches == 1:
        return one(jax.tree.map(lambda leaf: leaf[0], microbatches))

    def add(total: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(microbatch)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda leaf: leaf[0], microbatches))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(add, zeros, microbatches)[0]


def _constrained(tree: Any, specs: Any, place: Callable[[PartitionSpec], NamedSharding]) -> Any:
    return jax.tree.map(
        lambda leaf, spec: jax.lax.with_sharding_constraint(leaf, place(spec)), tree, specs
    )
