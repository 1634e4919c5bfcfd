"""What the magnitudes of FP8 tensors send in a step, by formula.

Of numbers of 4 bytes, largest over their ranks (an all-reduce):

    delayed scaling    3 numbers for each linear layer and layer, once, over all ranks of a site
                       that share them (`geojax.step.amax_history`)
    current scaling    1 number for each kernel that travels rounded, layer and expert, once, over
                       the ranks that share it (`geojax.step.fp8_all_gather`); and what products
                       send over `tensor` and `context` (`geojax.planner.traffic.amax`)

Blocks with scales of their own send nothing.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from geojax.hlo.conventions import all_reduce_bytes
from geojax.models import ModelConfig
from geojax.planner.traffic.amax import expected_amax_bytes
from geojax.planner.traffic.sent import Sent, add, layers_of_pass, nothing, passes_of, ranks_of
from geojax.planner.traffic.weights import following_spans
from geojax.step.amax_history import history_layouts, shared_axes
from geojax.step.fp8_all_gather import sharing_axes, travels_rounded
from geojax.step.gather import site_shape
from geojax.step.plan import StepPlan

_NUMBER = jnp.dtype(jnp.float32).itemsize


def expected_statistics(model: ModelConfig, layouts: Any, plan: StepPlan) -> Sent:
    """What one device sends in one step, but for a mixture's further exchanges.

    Args:
        model: the model.
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs.
    """
    sent, recipe = nothing(), plan.policy.recipe
    if recipe is None or not recipe.per_tensor:
        return sent
    if recipe.history:
        places = jax.tree.leaves(history_layouts(model, plan))
        numbers = sum(math.prod(place.part_shape[:3]) for place in places)
        for axes in shared_axes(plan):
            sent[axes] += all_reduce_bytes(_NUMBER * numbers, ranks_of(axes, plan))
        return sent
    layers = layers_of_pass(model, plan)
    if plan.staged_layers is None:
        layers = 0
        for count, follow, places in following_spans(model, layouts, plan):
            if follow:
                layers += count
                add(sent, _kernels(places, plan))
    rounded = jax.tree_util.tree_map_with_path(
        lambda path, place: travels_rounded(path, place, plan), layouts["layers"]
    )
    of_layer = expected_amax_bytes(model, plan.parallelism, rounded, remat=plan.remat)
    add(sent, of_layer, layers * passes_of(plan))
    return sent


def _kernels(places: Any, plan: StepPlan) -> Sent:
    sent = nothing()
    for path, place in jax.tree.leaves_with_path(places):
        if travels_rounded(path, place, plan):
            axes, numbers = sharing_axes(place, plan), math.prod(site_shape(place, plan)[:-2])
            sent[axes] += all_reduce_bytes(_NUMBER * numbers, ranks_of(axes, plan))
    return sent
