"""Optimizers on shards: the settings and the optax chain."""

from typing import Annotated, Any

import jax
import optax
import pydantic

from geojax.models import decay_mask
from geojax.optim.clip import clip_by_global_norm
from geojax.optim.layout import LeafLayout, replicated
from geojax.optim.registry import MomentSettings, optimizer_entry
from geojax.optim.schedules import ScheduleSettings, learning_rate_schedule
from geojax.optim.skipped_steps import SkipAwareTransformation, keep_on_skipped_steps

OptimizerName = Annotated[str, pydantic.AfterValidator(lambda name: optimizer_entry(name).name)]
"""The name of an entry in `geojax.optim.registry`."""


class OptimizerSettings(ScheduleSettings, MomentSettings):
    """An optimizer and its learning rates."""

    name: OptimizerName = "adamw"
    """"adamw", "lion" or another entry of `geojax.optim.registry`, which tells the settings that
    each reads."""

    weight_decay: float = pydantic.Field(default=0.1, ge=0, le=100)
    """Decoupled weight decay of matrices and embeddings; norms and biases are not decayed."""

    clip_norm: float | None = pydantic.Field(default=1.0, ge=1e-9, le=1e9)
    """Gradients are scaled to at most this global norm; null leaves them as they are."""


def make_optimizer(settings: OptimizerSettings, steps: int) -> SkipAwareTransformation:
    """Make the optax chain that runs on each rank's shards, inside the step's `shard_map`."""
    schedule = learning_rate_schedule(settings, steps)
    clip = [clip_by_global_norm(settings.clip_norm)] if settings.clip_norm else []
    return keep_on_skipped_steps(
        *clip,
        optimizer_entry(settings.name).directions(settings),
        optax.add_decayed_weights(settings.weight_decay, mask=decay_mask),
        # Optax counts updates from 0, where the warm-up's rate is 0: the first would be lost.
        optax.scale_by_learning_rate(lambda count: schedule(count + 1)),
    )


def optimizer_layouts(optimizer: optax.GradientTransformation, parameter_layouts: Any) -> Any:
    """Return the `LeafLayout` of each leaf of the optimizer's state: moments lie as parameters do.

    Raises:
        ValueError: a leaf that belongs to a parameter has another shape, so that the optimizer
            does not work element by element and cannot run on shards.
    """
    parameters = jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(layout.shape, layout.dtype), parameter_layouts
    )
    state = jax.eval_shape(optimizer.init, parameters)
    return optax.tree_utils.tree_map_params(
        optimizer,
        _layout_of_moment,
        state,
        parameter_layouts,
        transform_non_params=replicated,
    )


def _layout_of_moment(moment: jax.ShapeDtypeStruct, parameter: LeafLayout) -> LeafLayout:
    if moment.shape != parameter.shape:
        raise ValueError(
            f"optimizer: the state of a parameter of shape {parameter.shape} has the shape "
            f"{moment.shape}; on shards a state needs the shape of its parameter"
        )
    return parameter
