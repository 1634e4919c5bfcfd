"""Optimizers on shards: the settings, the optax chain, and where each leaf of its state lies."""

import dataclasses
from typing import Any

import jax
import optax
import pydantic

from geojax.optim.algorithms.adafactor import DIM_OF_MEANS
from geojax.optim.averages import average_weights, schedule_free
from geojax.optim.clip import clip_by_global_norm
from geojax.optim.expert_bias import balance_experts
from geojax.optim.parameter_groups import (
    LeafSettings,
    ParameterGroup,
    decay_weights,
    divide_leaves,
    leaf_settings,
    scale_leaves,
)
from geojax.optim.registry import FALLBACK, MomentSettings, OptimizerName, optimizer_entry
from geojax.optim.schedules import ScheduleSettings, learning_rate_schedule
from geojax.optim.skipped_steps import SkipAwareTransformation, keep_on_skipped_steps
from geojax.sharding.leaf_layouts import LeafLayout, replicated


class OptimizerSettings(ScheduleSettings, MomentSettings):
    """An optimizer and its learning rates."""

    name: OptimizerName = "adamw"
    """Optimizer: "adamw", "lion", "muon", "adafactor", "schedule_free_adamw" or "sgd"."""

    weight_decay: float = pydantic.Field(default=0.1, ge=0, le=100)
    """Decoupled weight decay of matrices and embeddings; norms and biases are not decayed."""

    clip_norm: float | None = pydantic.Field(default=1.0, ge=1e-9, le=1e9)
    """Largest global norm of the gradients; larger gradients are scaled down. null: no clipping."""

    ema_decay: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights. Validation, samples, export and
    generation then take the average. null: no average."""

    groups: tuple[ParameterGroup, ...] = pydantic.Field(default=(), max_length=256)
    """Parameters with their own learning rate, weight decay or optimizer. A parameter belongs to
    the first group that matches."""

    router_bias_rate: float = pydantic.Field(default=1e-3, ge=0, le=1)
    """With `model.use_router_bias`: amount by which a step raises or lowers an expert's bias."""

    @pydantic.model_validator(mode="after")
    def _averages_once(self) -> "OptimizerSettings":
        averaging = {name for name in self.optimizers if optimizer_entry(name).averages}
        if not averaging:
            return self
        required = {
            "schedule=constant": self.schedule == "constant",
            "ema_decay=null": self.ema_decay is None,
            "beta1 above 0": self.beta1 > 0,
            "no other optimizer in a group": self.optimizers == averaging,
        }
        missing = [name for name, holds in required.items() if not holds]
        if missing:
            raise ValueError(
                f"{min(averaging)} requires {' and '.join(missing)}: it averages the weights of "
                "all parameters itself, in place of a decay"
            )
        return self

    @property
    def optimizers(self) -> frozenset[str]:
        """The names of the optimizers that parameters may have."""
        chosen = {self.name, *(group.optimizer or self.name for group in self.groups)}
        some = any(optimizer_entry(name).takes for name in chosen)
        return frozenset(chosen | {FALLBACK} if some else chosen)

    def of_leaf(self, name: str) -> LeafSettings:
        """Return the settings of the parameter with the dotted `name`."""
        return leaf_settings(name, self.groups, optimizer=self.name, weight_decay=self.weight_decay)


def make_optimizer(settings: OptimizerSettings, steps: int) -> SkipAwareTransformation:
    """Make the optax chain that runs on each rank's shards, inside the step's `shard_map`."""
    schedule = learning_rate_schedule(settings, steps)
    # A link in either case, so that a run may be resumed with clipping or without.
    clip = clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    factors = []
    if any(group.learning_rate_factor != 1 for group in settings.groups):
        factors = [scale_leaves(lambda name: settings.of_leaf(name).learning_rate_factor)]
    chain = keep_on_skipped_steps(
        clip,
        _directions(settings),
        decay_weights(lambda name: settings.of_leaf(name).weight_decay),
        # Optax counts updates from 0, where the warm-up's rate is 0: the first would be lost.
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
        *factors,
    )
    averages = []
    if optimizer_entry(settings.name).averages:
        averages = [schedule_free(settings.beta1, schedule)]
    elif settings.ema_decay is not None:
        averages = [average_weights(settings.ema_decay)]
    return keep_on_skipped_steps(balance_experts(chain, settings.router_bias_rate), *averages)


def _directions(settings: OptimizerSettings) -> optax.GradientTransformation:
    names = settings.optimizers
    made = {name: optimizer_entry(name).directions(settings) for name in sorted(names)}
    if len(made) == 1:
        return made[settings.name]
    return divide_leaves(made, lambda name: settings.of_leaf(name).optimizer)


def optimizer_layouts(optimizer: optax.GradientTransformation, parameter_layouts: Any) -> Any:
    """Return the `LeafLayout` of each leaf of the optimizer's state: moments lie as parameters do.

    A leaf belongs to the parameter whose path its own path ends with. Means lack a dim of it
    (`geojax.optim.algorithms.adafactor.DIM_OF_MEANS`).

    Raises:
        ValueError: a leaf that belongs to a parameter has another shape, so that it cannot be kept
            in shards.
    """
    parameters = jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(layout.shape, layout.dtype), parameter_layouts
    )
    state = jax.eval_shape(optimizer.init, parameters)
    by_path = dict(jax.tree_util.tree_leaves_with_path(parameter_layouts))
    longest = max(map(len, by_path))

    def layout(path: Any, leaf: jax.ShapeDtypeStruct) -> LeafLayout:
        ends = (path[-length:] for length in range(min(longest, len(path)), 0, -1))
        owner = next((by_path[end] for end in ends if end in by_path), None)
        if owner is None:
            return replicated(leaf)
        fields = (getattr(entry, "name", None) for entry in path)
        of_means = next((DIM_OF_MEANS[name] for name in fields if name in DIM_OF_MEANS), None)
        return _layout_of_moment(leaf, owner if of_means is None else owner.without_dim(of_means))

    return jax.tree_util.tree_map_with_path(layout, state)


def _layout_of_moment(moment: jax.ShapeDtypeStruct, parameter: LeafLayout) -> LeafLayout:
    if moment.shape != parameter.shape:
        raise ValueError(
            f"optimizer: the state of a parameter of shape {parameter.shape} has the shape "
            f"{moment.shape}; on shards a state needs the shape of its parameter"
        )
    return dataclasses.replace(parameter, dtype=moment.dtype)
