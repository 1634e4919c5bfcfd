"""The optimizers of the registry as optax alone has them, on one device."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from geojax.models.declaration import KindOf
from geojax.named_arrays import leaf_name
from geojax.optim import OptimizerSettings, learning_rate_schedule


def chain_of_optax(
    settings: OptimizerSettings, steps: int, kind_of: KindOf
) -> optax.GradientTransformation:
    """Optax's optimizer of `settings`, whose groups have nothing but an optimizer of their own."""
    rate = learning_rate_schedule(settings, steps)
    chain = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        _directions(settings, kind_of),
        optax.add_decayed_weights(
            settings.weight_decay,
            functools.partial(_by_name, lambda name: kind_of(name) != "vector"),
        ),
        optax.scale_by_learning_rate(lambda count: rate(count + 1)),
    )
    if settings.name == "schedule_free_adamw":
        return optax.contrib.schedule_free(chain, rate, settings.beta1)
    return chain


def average_of_optax(settings: OptimizerSettings, parameters: Any, state: Any, average: Any) -> Any:
    """The weights to evaluate, from those of the step before."""
    if settings.name == "schedule_free_adamw":
        return optax.contrib.schedule_free_eval_params(state, parameters)
    if settings.ema_decay is None:
        return parameters
    return optax.incremental_update(parameters, average, 1 - settings.ema_decay)


def _directions(settings: OptimizerSettings, kind_of: KindOf) -> optax.GradientTransformation:
    """Optax's transformation between clipping and weight decay."""
    made = {name: _directions_of(name, settings, kind_of) for name in settings.optimizers}
    label = functools.partial(
        _by_name, lambda name: settings.of_leaf(name, kind_of(name)).optimizer
    )
    return optax.partition(made, label)


def _directions_of(
    name: str, settings: OptimizerSettings, kind_of: KindOf
) -> optax.GradientTransformation:
    betas = settings.beta1, settings.beta2
    if name == "adamw":
        return optax.scale_by_adam(*betas, eps=settings.epsilon)
    if name == "lion":
        return optax.scale_by_lion(*betas)
    if name == "sgd":
        return optax.trace(settings.beta1)
    if name == "muon":
        return optax.chain(_muon(settings), optax.stateless(_scale))
    if name == "adafactor":
        return _by_matrix(
            optax.chain(
                optax.scale_by_factored_rms(min_dim_size_to_factor=1), optax.clip_by_block_rms(1.0)
            ),
            kind_of,
        )
    assert name == "schedule_free_adamw", f"{name} is not in this table"
    return optax.scale_by_rms(
        settings.beta2, settings.epsilon, eps_in_sqrt=False, bias_correction=True
    )


def _by_name(function: Callable[[str], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: function(leaf_name(path)), tree)


def _by_matrix(
    transformation: optax.GradientTransformation, kind_of: KindOf
) -> optax.GradientTransformation:
    """Apply a transformation to each layer's and expert's matrix or vector by itself."""

    def stacked(path: Any, leaf: jax.Array) -> jax.Array:
        dims = 1 if kind_of(leaf_name(path)) == "vector" else 2
        return leaf.reshape(-1, *leaf.shape[leaf.ndim - dims :])

    def init(parameters: Any) -> Any:
        each = jax.tree_util.tree_map_with_path(stacked, parameters)
        return jax.tree.map(jax.vmap(transformation.init), each)

    def update(updates: Any, state: Any, parameters: Any) -> tuple[Any, Any]:
        leaves, structure = jax.tree.flatten(updates)
        each, weights = (
            jax.tree.leaves(jax.tree_util.tree_map_with_path(stacked, tree))
            for tree in (updates, parameters)
        )
        states = structure.flatten_up_to(state)
        apply = jax.vmap(transformation.update)
        made = [apply(*own) for own in zip(each, states, weights, strict=True)]
        shaped = [new.reshape(leaf.shape) for (new, _), leaf in zip(made, leaves, strict=True)]
        return structure.unflatten(shaped), structure.unflatten([kept for _, kept in made])

    return optax.GradientTransformation(init, update)


def _muon(settings: OptimizerSettings) -> optax.GradientTransformation:
    def dims(updates: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)

    return optax.contrib.scale_by_muon(
        beta=settings.muon_momentum, eps=settings.epsilon, weight_dimension_numbers=dims
    )


def _scale(updates: Any, _: Any) -> Any:
    return jax.tree.map(lambda leaf: 0.2 * math.sqrt(max(leaf.shape[-2:])) * leaf, updates)
