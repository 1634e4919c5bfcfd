"""Delayed scaling: the largest magnitudes of past steps, from which this step's scales come.

    history [rows, sites, 3, steps] ─► its largest ─► expected [rows, 3], beside each layer's kernel
                                                          │ forward, backward
    history, a step on  ◄─ pmax over the ranks of a site ◄─ seen [rows, 3], of all microbatches

Rows are layers, and 3 are x, w and dy of the products with a kernel. What was seen comes out of the
backward pass in the place of the gradient of what was expected, and it is no gradient: it is
maximised, not summed, and no optimizer, clipping or averaging knows it. All of it travels in one
message a step, inside the site: each site keeps a history of its own, and nothing crosses `dc`. On
request (`StepPlan.sites_share_scales`) sites have one history together, and so the same scales: a
second message a step then carries each site's largest between them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import drop_single, to_varying
from geojax.mesh import AXES
from geojax.models import ModelConfig, Parameters, parameter_shapes
from geojax.optim import LeafLayout
from geojax.optim.layout import Cut
from geojax.precision import AMAX
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import stage_rows

_OPERANDS = 3


def history_layouts(model: ModelConfig, plan: StepPlan) -> Any:
    """The `LeafLayout` of each linear layer's history; None where scales need none.

    float32 [layers, sites, 3, steps]; sites that share scales have one together, as have those that
    hold other layers of a pipeline.
    """
    recipe = plan.policy.recipe
    if recipe is None or recipe.history == 0:
        return None
    sites = 1 if "dc" in plan.stage_axes or plan.sites_share_scales else plan.mesh.shape["dc"]
    parts = (Cut(1, ("dc",), sites),) if sites > 1 else ()
    stages = None
    if plan.staged_layers is not None:
        rows = stage_rows(model, plan.staged_layers, plan.stage_axes)["layers"]
        stages = jax.tree.leaves(rows)[0]
    shape = (model.layers, sites, _OPERANDS, recipe.history)
    place = LeafLayout(shape, jnp.dtype(jnp.float32), parts, stages=stages)
    return _of_linear_layers(parameter_shapes(model)["layers"], place)


def _of_linear_layers(tree: Any, place: LeafLayout) -> Any:
    """`place` as the `AMAX` of each linear layer that may follow a recipe."""
    made = {}
    for name, below in tree.items():
        if "kernel" in below and name != "router":
            made[name] = {AMAX: place}
        elif not {"kernel", "scale"} & set(below):
            made[name] = _of_linear_layers(below, place)
    return made


def expected(history: Any, plan: StepPlan) -> Any:
    """[rows, 3] of each linear layer of this rank: what to expect; None without a history.

    Typed as varying over all axes along which ranks see other numbers, so that nothing sums what
    they see.
    """
    sizes = plan.mesh.shape
    inside = [axis for axis in ("context", "tensor") if sizes[axis] > 1]

    def largest(leaf: jax.Array) -> jax.Array:
        return to_varying(leaf.max(axis=-1)[:, 0], (*plan.batch_axes, *inside, *plan.stage_axes))

    return jax.tree.map(largest, history)


def shared_axes(plan: StepPlan) -> list[tuple[str, ...]]:
    """The axes, longer than 1, of each message about what was seen: those of a site, and then `dc`
    if sites share scales."""
    between = ("dc", *plan.stage_axes)
    long = [axis for axis in AXES if plan.mesh.shape[axis] > 1]
    inside = tuple(axis for axis in long if axis not in between)
    across = ("dc",) if plan.sites_share_scales and "dc" in long else ()
    return [axes for axes in (inside, across) if axes]


@jax.named_scope("amax_history")
def next_history(history: Any, seen: Any, plan: StepPlan) -> Any:
    """The history with what all ranks that share it have seen, and without its oldest step.

    What is not finite is not remembered: what was expected is, once more.

    Args:
        history: of this rank's site and stage.
        seen: float32 [rows, 3] of each linear layer, the largest of all microbatches of this rank.
        plan: how the step runs.
    """
    if history is None:
        return None
    leaves, structure = jax.tree.flatten(seen)
    packed = jnp.concatenate([leaf.astype(jnp.float32).ravel() for leaf in leaves])
    for axes in shared_axes(plan):
        packed = lax.pmax(packed, axes)
    sizes = plan.mesh.shape
    single = [axis for axis in AXES if sizes[axis] == 1 and axis not in plan.stage_axes]
    ends = [sum(leaf.size for leaf in leaves[:count]) for count in range(1, len(leaves))]
    parts = jnp.split(drop_single(packed, single), ends)
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]

    def roll(old: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.where(jnp.isfinite(new), new, old.max(axis=-1)[:, 0])
        return jnp.concatenate([new[:, None, :, None], old[..., :-1]], axis=-1)

    return jax.tree.map(roll, history, jax.tree.unflatten(structure, shaped))


def attach(weights: Parameters, amax: Any) -> Parameters:
    """The layers' `weights` with `amax`, a tree of `AMAX` leaves, beside their kernels."""
    if amax is None or AMAX in amax:
        return weights | (amax or {})
    return weights | {name: attach(weights[name], below) for name, below in amax.items()}


def detach(gradients: Parameters) -> tuple[Parameters, Any]:
    """The inverse of `attach`: gradients of weights, and what was seen (None: nothing)."""
    weights, amax = {}, {}
    for name, below in gradients.items():
        if name == AMAX:
            amax[name] = below
        elif isinstance(below, dict):
            weights[name], inside = detach(below)
            if inside:
                amax[name] = inside
        else:
            weights[name] = below
    return weights, amax or None
