"""Averages of the weights: validation, samples, export and generation take them in their place.

Each follows all else that moves the weights, and its average is a part of the optimizer's state: it
is sharded, saved and kept on a skipped step as a moment is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from geojax.models.moe.router import is_score_bias

AVERAGE = "average"
"""Name of the field that holds the averaged weights in the state of each link."""


class EmaState(NamedTuple):
    """The state of `average_weights`."""

    average: Any


class ScheduleFreeState(NamedTuple):
    """The state of `schedule_free`."""

    count: Any
    weight_sum: Any
    """Sum of the weights of all updates in the average."""
    largest_rate: Any
    """Largest learning rate so far."""
    average: Any


def average_weights(decay: float) -> optax.GradientTransformation:
    """Keep the exponential moving average of the weights; updates pass through as they are."""

    def init(parameters: Any) -> EmaState:
        return EmaState(jax.tree.map(jnp.copy, parameters))

    def update(updates: Any, state: EmaState, parameters: Any = None) -> tuple[Any, EmaState]:
        new = optax.apply_updates(parameters, updates)
        average = jax.tree.map(
            lambda old, weight: decay * old + (1 - decay) * weight, state.average, new
        )
        return updates, EmaState(average)

    return optax.GradientTransformation(init, update)


def schedule_free(beta1: float, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Average the iterates of the chain before it (Defazio et al., arXiv 2405.15682).

    As `optax.contrib.schedule_free`: gradients are taken at y = (1 - beta1) z + beta1 x, the chain
    moves z, and x is the average of all z, each with the square of the largest learning rate so far
    as its weight. Optax keeps z beside the parameters y; here it is x, which is evaluated, and
    z - x = (y - x) / (1 - beta1). Experts' biases (`geojax.optim.optimizer`) are no weights: x
    has them as y does, moved by their whole step.

    Args:
        beta1: between 0 and 1, the share of x in y.
        schedule: learning rate by update, counted from 1.
    """

    def init(parameters: Any) -> ScheduleFreeState:
        zero = jnp.zeros([], optax.tree.dtype(parameters, "lowest"))
        average = jax.tree.map(jnp.copy, parameters)
        return ScheduleFreeState(jnp.zeros([], jnp.int32), zero, zero, average)

    def update(
        updates: Any, state: ScheduleFreeState, parameters: Any = None
    ) -> tuple[Any, ScheduleFreeState]:
        count = state.count + 1
        rate = jnp.asarray(schedule(count), state.largest_rate.dtype)
        largest = jnp.maximum(state.largest_rate, rate)
        weight_sum = state.weight_sum + largest**2
        share = jnp.where(weight_sum > 0, largest**2 / weight_sum, 0)

        def step_of_average(path: Any, y: jax.Array, x: jax.Array, step: jax.Array) -> jax.Array:
            return step if is_score_bias(path) else share * ((y - x) / (1 - beta1) + step)

        moved = jax.tree_util.tree_map_with_path(
            step_of_average, parameters, state.average, updates
        )
        of_parameters = jax.tree.map(
            lambda of_x, of_z: beta1 * of_x + (1 - beta1) * of_z, moved, updates
        )
        average = jax.tree.map(jnp.add, state.average, moved)
        return of_parameters, ScheduleFreeState(count, weight_sum, largest, average)

    return optax.GradientTransformation(init, update)


def evaluated_weights(parameters: Any, optimizer_state: Any) -> Any:
    """Return the average of the weights where the optimizer keeps one, else the parameters.

    Args:
        parameters: the tree of parameters.
        optimizer_state: the optimizer's state, of arrays or anything else leaf by leaf.
    """
    found = _average_states(optimizer_state)
    return found[0].average if found else parameters


def restart_average(optimizer_state: Any, parameters: Any) -> Any:
    """Return a new run's optimizer state with its average, if it keeps one, at other parameters."""

    def restart(node: Any) -> Any:
        if not _is_average_state(node):
            return node
        return node._replace(average=jax.tree.map(jnp.copy, parameters))

    return jax.tree.map(restart, optimizer_state, is_leaf=_is_average_state)


def _average_states(optimizer_state: Any) -> list[Any]:
    nodes = jax.tree.leaves(optimizer_state, is_leaf=_is_average_state)
    return [node for node in nodes if _is_average_state(node)]


def _is_average_state(node: Any) -> bool:
    return isinstance(node, EmaState | ScheduleFreeState)
