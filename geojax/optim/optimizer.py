"""Optimizers on shards: the settings, the optax chain, and where each leaf of its state lies.

Parameter groups are leaves with a learning rate, a weight decay or an optimizer of their own. Every
leaf has a dotted name, as in checkpoints (`layers.attention.query.kernel`). The first group whose
pattern is found in it gives its settings; what a group leaves out is the optimizer's.

The biases that balance experts lie beside the weights that an optimizer trains. In place of a
gradient they have the excess of their experts' choices, summed like one over the step's whole batch
(`geojax.models.moe.score_bias`).
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pydantic

from geojax.errors import UserError
from geojax.models.declaration import Kind, KindOf, kind_by_name
from geojax.models.moe.router import is_score_bias
from geojax.named_arrays import leaf_name
from geojax.optim.algorithms.adafactor import DIM_OF_MEANS
from geojax.optim.averages import average_weights, schedule_free
from geojax.optim.clip import clip_by_global_norm
from geojax.optim.optimizer_state import SkipAwareTransformation, keep_on_skipped_steps
from geojax.optim.registry import FALLBACK, MomentSettings, OptimizerName, optimizer_entry
from geojax.optim.schedules import ScheduleSettings, learning_rate_schedule
from geojax.settings import Settings
from geojax.sharding.leaf_layouts import LeafLayout, replicated


class ParameterGroup(Settings):
    """The leaves whose names a pattern is found in, and what is their own."""

    pattern: str = pydantic.Field(min_length=1, max_length=1000)
    """Regular expression that is searched in a parameter's name, such as
    `layers.attention.query.kernel` or `embedding.tokens.embedding`."""

    learning_rate_factor: float = pydantic.Field(default=1.0, ge=0, le=1e6)
    """Factor of the learning rate; 0 freezes the parameters."""

    weight_decay: float | None = pydantic.Field(default=None, ge=0, le=100)
    """Weight decay. null: the optimizer's; norms and biases have none."""

    optimizer: OptimizerName | None = None
    """Optimizer of these parameters. null: the run's optimizer. AdamW takes parameters that the
    optimizer cannot, such as biases in a group with Muon."""

    @pydantic.field_validator("pattern")
    @classmethod
    def _is_an_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"'{value}' is no regular expression ({error})") from None
        return value

    def has(self, name: str) -> bool:
        """Return True if the parameter `name` is in the group."""
        return re.search(self.pattern, name) is not None


class LeafSettings(NamedTuple):
    """The settings of one parameter."""

    optimizer: str
    weight_decay: float
    learning_rate_factor: float


def leaf_settings(
    name: str, kind: Kind, groups: Iterable[ParameterGroup], *, optimizer: str, weight_decay: float
) -> LeafSettings:
    """Return the settings of the parameter `name`.

    Args:
        name: dotted name.
        kind: what it is.
        groups: the groups, the first of which that has the parameter counts.
        optimizer: the optimizer of a parameter in no group.
        weight_decay: its weight decay, unless it is a vector.
    """
    own = next((group for group in groups if group.has(name)), None)
    decay = 0.0 if kind == "vector" else weight_decay
    chosen = optimizer if own is None or own.optimizer is None else own.optimizer
    takes = optimizer_entry(chosen).takes
    if takes not in (None, kind):
        chosen = FALLBACK
    if own is None:
        return LeafSettings(chosen, decay, 1.0)
    return LeafSettings(
        chosen,
        decay if own.weight_decay is None else own.weight_decay,
        own.learning_rate_factor,
    )


def check_groups(groups: Iterable[ParameterGroup], parameters: Any) -> None:
    """Check that each group has a parameter of a tree.

    Raises:
        UserError: one has none.
    """
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)]
    for group in groups:
        if not any(map(group.has, names)):
            raise UserError(
                f"optimizer.groups: the pattern '{group.pattern}' is in no parameter's name; "
                f"names are as {names[0]} and {names[-1]}"
            )


def decay_weights(rate_of: Callable[[str], float]) -> optax.GradientTransformation:
    """Add to each update its parameter times the rate of its name."""

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        def decay(path: Any, update: jax.Array, parameter: jax.Array) -> jax.Array:
            rate = rate_of(leaf_name(path))
            return update + rate * parameter if rate else update

        return jax.tree_util.tree_map_with_path(decay, updates, parameters), state

    return optax.GradientTransformation(lambda parameters: optax.EmptyState(), update)


def scale_leaves(factor_of: Callable[[str], float]) -> optax.GradientTransformation:
    """Multiply each update with the factor of its parameter's name."""

    def update(updates: Any, state: Any, parameters: Any = None) -> tuple[Any, Any]:
        def scale(path: Any, update: jax.Array) -> jax.Array:
            factor = factor_of(leaf_name(path))
            return update if factor == 1 else factor * update

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(lambda parameters: optax.EmptyState(), update)


def divide_leaves(
    transformations: Mapping[str, optax.GradientTransformation], label_of: Callable[[str], str]
) -> SkipAwareTransformation:
    """Let each transformation update the leaves whose names have its label.

    Its state is a dict by label. In the trees that a transformation gets, the parameters and the
    `layouts` among them, the leaves of the others are None, as frozen ones are anyway. Unlike
    `optax.partition` it leaves each transformation to keep its own state on a skipped step.
    """
    aware = {label: keep_on_skipped_steps(each) for label, each in transformations.items()}

    def only(label: str, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf if label_of(leaf_name(path)) == label else None, tree
        )

    def init(parameters: Any) -> dict[str, Any]:
        return {label: each.init(only(label, parameters)) for label, each in aware.items()}

    def update(
        gradients: Any,
        state: dict[str, Any],
        parameters: Any = None,
        *,
        layouts: Any = None,
        **extra: Any,
    ) -> tuple[Any, dict[str, Any]]:
        made, states = [], {}
        for label, each in aware.items():
            own = {"layouts": None if layouts is None else only(label, layouts)}
            updates, states[label] = each.update(
                only(label, gradients), state[label], only(label, parameters), **own, **extra
            )
            made.append(updates)
        joined = jax.tree.map(
            lambda *found: next((leaf for leaf in found if leaf is not None), None),
            *made,
            is_leaf=lambda leaf: leaf is None,
        )
        return joined, states

    return SkipAwareTransformation(init, update)


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

    def of_leaf(self, name: str, kind: Kind) -> LeafSettings:
        """Return the settings of the parameter with the dotted `name`."""
        return leaf_settings(
            name, kind, self.groups, optimizer=self.name, weight_decay=self.weight_decay
        )


def make_optimizer(
    settings: OptimizerSettings, steps: int, kind_of: KindOf = kind_by_name
) -> SkipAwareTransformation:
    """Make the optax chain that runs on each rank's shards, inside the step's `shard_map`.

    Args:
        settings: the optimizer.
        steps: length of the run.
        kind_of: the kind of each parameter, from `geojax.models.parameter_kinds`.
    """

    def of_leaf(name: str) -> LeafSettings:
        return settings.of_leaf(name, kind_of(name))

    schedule = learning_rate_schedule(settings, steps)
    # A link in either case, so that a run may be resumed with clipping or without.
    clip = clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    factors = []
    if any(group.learning_rate_factor != 1 for group in settings.groups):
        factors = [scale_leaves(lambda name: of_leaf(name).learning_rate_factor)]
    chain = keep_on_skipped_steps(
        clip,
        _directions(settings, kind_of),
        decay_weights(lambda name: of_leaf(name).weight_decay),
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


def _directions(settings: OptimizerSettings, kind_of: KindOf) -> optax.GradientTransformation:
    names = settings.optimizers
    made = {name: optimizer_entry(name).directions(settings, kind_of) for name in sorted(names)}
    if len(made) == 1:
        return made[settings.name]
    return divide_leaves(made, lambda name: settings.of_leaf(name, kind_of(name)).optimizer)


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


def balance_experts(optimizer: SkipAwareTransformation, rate: float) -> SkipAwareTransformation:
    """Move the bias of every expert by `rate` against the sign of its excess.

    Wang et al. 2024 ("Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
    algorithm 1). All other leaves are `optimizer`'s, which sees gradients of zero for the biases.
    """

    def update(gradients: Any, state: Any, parameters: Any = None, **extra: Any) -> tuple[Any, Any]:
        of_weights = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.zeros_like(leaf) if is_score_bias(path) else leaf, gradients
        )
        updates, state = optimizer.update(of_weights, state, parameters, **extra)
        moved = jax.tree_util.tree_map_with_path(
            lambda path, change, leaf: (
                -rate * jnp.sign(leaf).astype(change.dtype) if is_score_bias(path) else change
            ),
            updates,
            gradients,
        )
        return moved, state

    return SkipAwareTransformation(optimizer.init, update)
