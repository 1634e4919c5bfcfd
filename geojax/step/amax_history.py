"""Delayed scaling: the amax of past steps, from which this step's scales come.

    history [L, sites, 3, steps] ─► its largest ─► prev_amax [L, 3], beside each layer's kernel
                                                          │ forward, backward
    history, a step on  ◄─ pmax over the ranks of a site ◄─ amax [L, 3], of all microbatches

An amax is the largest magnitude in a tensor; the 3 are x, w and dy of a linear layer. In the
gradient tree the leaf of `prev_amax` holds the amax observed in this step, which is not a gradient
and must never be summed: no optimizer, clipping or averaging sees it. All of them travel in one
message a step, inside the site: each site keeps a history of its own, and nothing crosses `dc`.
With `StepPlan.share_amax_across_dc` sites have one history together, and so the same scales: a
second message a step then carries each site's amax between them.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import drop_single, to_varying
from geojax.mesh import AXES
from geojax.models import AnyModel
from geojax.models.declaration import Declaration
from geojax.models.parameters import declarations
from geojax.precision import AMAX
from geojax.sharding import LeafLayout
from geojax.sharding.leaf_layouts import DimSharding
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import stage_assignments

SITE_DIM = 1
"""The dimension of a history that counts sites."""

_OPERANDS = 3


def history_layouts(model: AnyModel, plan: StepPlan) -> Any:
    """Lay out each linear layer's history [L, sites, 3, steps]; None where scales need none.

    Sites that share scales have one history together, as have those that hold different layers.
    """
    recipe = plan.policy.recipe
    if recipe is None or recipe.history == 0:
        return None
    sites = 1 if "dc" in plan.stage_axes or plan.share_amax_across_dc else plan.mesh.shape["dc"]
    shardings = (DimSharding(SITE_DIM, ("dc",), sites),) if sites > 1 else ()
    stages = None
    if plan.staged_layers is not None:
        assignments = stage_assignments(model, plan.staged_layers, plan.stage_axes)["layers"]
        stages = jax.tree.leaves(assignments)[0]
    shape = (model.num_stacked_layers, sites, _OPERANDS, recipe.history)
    leaf_layout = LeafLayout(shape, jnp.dtype(jnp.float32), shardings, stages=stages)
    return _of_linear_layers(declarations(model)["layers"], leaf_layout)


def _of_linear_layers(tree: Any, leaf_layout: LeafLayout) -> Any:
    """Give each linear layer that may follow a recipe `leaf_layout` as its `AMAX`."""
    made = {}
    for name, below in tree.items():
        if isinstance(below, Declaration):
            if below.fp8:
                return {AMAX: leaf_layout}
        elif of_below := _of_linear_layers(below, leaf_layout):
            made[name] = of_below
    return made


def prev_amax(history: Any, plan: StepPlan) -> Any:
    """Take the largest amax [L, 3] of each linear layer's history; None without a history.

    It is typed as varying over all axes along which ranks see other numbers, so that nothing sums
    the amax that comes back in its place.
    """
    sizes = plan.mesh.shape
    inside = [axis for axis in ("context", "tensor") if sizes[axis] > 1]

    def largest(leaf: jax.Array) -> jax.Array:
        return to_varying(leaf.max(axis=-1)[:, 0], (*plan.batch_axes, *inside, *plan.stage_axes))

    return jax.tree.map(largest, history)


def site_axes(plan: StepPlan) -> tuple[str, ...]:
    """List the axes, longer than 1, whose ranks see parts of the same tensors inside a site."""
    between = ("dc", *plan.stage_axes)
    return tuple(axis for axis in AXES if plan.mesh.shape[axis] > 1 and axis not in between)


@jax.named_scope("amax_history")
def max_in_site(amax: Any, plan: StepPlan) -> jax.Array | None:
    """Pack the largest amax of all ranks of a site into one vector; None where there is none.

    Args:
        amax: float32 [L, 3] of each linear layer, the largest of all microbatches of this rank.
        plan: how the step runs.
    """
    leaves = jax.tree.leaves(amax)
    if not leaves:
        return None
    packed = jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in leaves])
    axes = site_axes(plan)
    packed = lax.pmax(packed, axes) if axes else packed
    sizes = plan.mesh.shape
    single = [axis for axis in AXES if sizes[axis] == 1 and axis not in plan.stage_axes]
    return drop_single(packed, single)


@jax.named_scope("amax_history")
def max_over_sites(amax: jax.Array | None, plan: StepPlan) -> jax.Array | None:
    """Take the largest of all sites' `max_in_site` if they share scales."""
    shared = plan.share_amax_across_dc and plan.mesh.shape["dc"] > 1
    return lax.pmax(amax, "dc") if shared else amax


@jax.named_scope("amax_history")
def next_history(history: Any, amax: jax.Array | None) -> Any:
    """Append a step's amax to the history, and drop its oldest step.

    An amax that is not finite is not remembered: the one before is, once more.

    Args:
        history: float32 [L, 1, 3, steps] of each linear layer, of this rank's site and stage.
        amax: from `max_in_site` or `max_over_sites`.
    """
    if history is None:
        return None
    assert amax is not None, "a history needs the amax of each step"
    leaves, structure = jax.tree.flatten(history)
    ends = itertools.accumulate(leaf[..., 0].size for leaf in leaves[:-1])

    def roll(old: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(old.shape[0], _OPERANDS)
        new = jnp.where(jnp.isfinite(new), new, old.max(axis=-1)[:, 0])
        return jnp.concatenate([new[:, None, :, None], old[..., :-1]], axis=-1)

    of_leaves = jnp.split(amax, list(ends))
    return jax.tree.unflatten(structure, map(roll, leaves, of_leaves))
