"""The training state of a site that holds a part of the model."""

import dataclasses

import jax
import optax

from geojax.islands.site_part import SitePart
from geojax.optim.optimizer import optimizer_layouts
from geojax.step.plan import StepPlan
from geojax.step.state import TrainState, initial_state, state_layouts


def site_layouts(
    part: SitePart, optimizer: optax.GradientTransformation, plan: StepPlan
) -> TrainState:
    """Lay out every leaf of a site's state: a tree of `LeafLayout`s."""
    whole = state_layouts(part.model, optimizer, plan)
    parameters = part.held_layouts(whole.parameters)
    return dataclasses.replace(
        whole,
        parameters=parameters,
        optimizer=optimizer_layouts(optimizer, parameters),
        amax_history=jax.tree.map(lambda layout: layout.of_layers(part.layers), whole.amax_history),
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
