"""The training state of a site that holds a part of the model."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from geojax.islands.site_part import SitePart
from geojax.optim import LeafLayout
from geojax.optim.optimizer import optimizer_layouts
from geojax.step.plan import StepPlan
from geojax.step.state import TrainState, initial_state, state_layouts


def site_layouts(
    part: SitePart, optimizer: optax.GradientTransformation, plan: StepPlan
) -> TrainState:
    """Lay out every leaf of a site's state: a tree of `LeafLayout`s."""
    whole = state_layouts(part.model, optimizer, plan)
    parameters = part.held_layouts(whole.parameters)
    return _of_part(whole, parameters, part.layers_layout, optimizer)


def saved_layouts(
    part: SitePart, optimizer: optax.GradientTransformation, plan: StepPlan
) -> TrainState:
    """Lay out every leaf of a site's state as a place in the whole model's, for checkpoints."""
    whole = state_layouts(part.model, optimizer, plan)
    parameters = part.saved_layouts(whole.parameters)
    return _of_part(whole, parameters, part.saved_layers_layout, optimizer)


def _of_part(
    whole: TrainState,
    parameters: Any,
    of_layers: Callable[[LeafLayout], LeafLayout],
    optimizer: optax.GradientTransformation,
) -> TrainState:
    return dataclasses.replace(
        whole,
        parameters=parameters,
        optimizer=optimizer_layouts(optimizer, parameters),
        amax_history=jax.tree.map(of_layers, whole.amax_history),
    )


def initial_site_state(
    part: SitePart,
    optimizer: optax.GradientTransformation,
    layouts: TrainState,
    plan: StepPlan,
    seed: int,
) -> TrainState:
    """Make a site's part of the state before the first step; arguments as `initial_state`."""
    return initial_state(part.model, optimizer, layouts, plan, seed, part.held)
