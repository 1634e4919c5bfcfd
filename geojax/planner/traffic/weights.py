"""Predicted bytes of the gathering of weights.

n ranks share S numbers. Gathered in the compute dtype, a device sends (n - 1) / n S times the
dtype's bytes. A kernel that travels quantized (`geojax.step.fp8_all_gather`) costs (n - 1) / n S
bytes. Scales come on top where shards have different ones: experts or blocks.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax

from geojax.hlo.conventions import all_gather_bytes
from geojax.models import AnyModel
from geojax.optim.leaf_groups import shard_axes
from geojax.planner.traffic.by_axes import BytesByAxes, add, long_axes, no_bytes, ranks_of
from geojax.precision import Recipe
from geojax.sharding import LeafLayout
from geojax.step.fp8_all_gather import is_fp8_gathered
from geojax.step.gather import scales_are_sent, site_shape
from geojax.step.plan import StepPlan


def predicted_weight_bytes(model: AnyModel, layouts: Any, plan: StepPlan) -> BytesByAxes:
    """Predict the bytes that one device sends in one step to gather weights.

    Args:
        model: the model.
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs.
    """
    sent = _across_sites(layouts, plan)
    for name, tree in layouts.items():
        if name != "layers":
            add(sent, _gather(tree, plan, follow=False))
    if plan.staged_layers is not None:
        add(sent, predicted_stage_bytes(layouts, plan))
        return sent
    passes = plan.layout.batch.microbatches * (2 if plan.layout.zero.reshard_after_forward else 1)
    for count, follow, span in following_spans(model, layouts, plan):
        by_layer = plan.layout.zero.stage == 3 and follow
        times = Fraction(1 + passes * count, count) if by_layer else 1
        add(sent, _gather(span, plan, follow=follow), times)
    return sent


def predicted_stage_bytes(layouts: Any, plan: StepPlan) -> BytesByAxes:
    """Predict what a device sends in one step to gather the layers of a stage inside its site."""
    return _gather(layouts["layers"], plan, follow=True)


def following_spans(
    model: AnyModel, layouts: Any, plan: StepPlan
) -> Iterator[tuple[int, bool, Any]]:
    """Yield the number of layers of each span, if it follows the FP8 recipe, and its layouts."""
    for count, matmul in plan.matmul.spans(model.num_stacked_layers):
        span = jax.tree.map(lambda leaf, count=count: leaf.of_layers(count), layouts["layers"])
        yield count, matmul.recipe == plan.policy.recipe, span


def _across_sites(layouts: Any, plan: StepPlan) -> BytesByAxes:
    sent = no_bytes()
    for leaf in jax.tree.leaves(layouts):
        if shard_axes(leaf)[1]:
            dtype = leaf.gathered_dtype(plan.policy.compute_dtype)
            shard_bytes = math.prod(leaf.shard_shape) * dtype.itemsize
            sent[long_axes(("dc",), plan)] += all_gather_bytes(shard_bytes, plan.mesh.shape["dc"])
    return sent


def _gather(layouts: Any, plan: StepPlan, *, follow: bool) -> BytesByAxes:
    sent = no_bytes()
    for leaf in jax.tree.leaves(layouts):
        axes, _ = shard_axes(leaf)
        if axes is None:
            continue
        dtype = leaf.gathered_dtype(plan.policy.compute_dtype)
        shard_bytes = math.prod(site_shape(leaf, plan)) * dtype.itemsize
        if follow and is_fp8_gathered(leaf, plan):
            assert plan.policy.recipe is not None, "a kernel that travels quantized needs a recipe"
            shard_bytes = _quantized_bytes(leaf, plan, plan.policy.recipe)
        sent[long_axes(axes, plan)] += all_gather_bytes(shard_bytes, ranks_of(axes, plan))
    return sent


def _quantized_bytes(leaf: LeafLayout, plan: StepPlan, recipe: Recipe) -> int:
    """Count the bytes of a rank's quantized shard of a kernel, and of its scales if sent."""
    form = recipe.weight
    *others, rows, columns = site_shape(leaf, plan)
    scales = list(others)
    if form.along is not None:
        scales += [-(-rows // form.along), -(-columns // form.along)]
    sent = math.prod(scales) if scales_are_sent(len(scales), leaf) else 0
    numbers = math.prod((*others, rows, columns))
    return numbers * form.dtype.itemsize + sent * form.scale_dtype.itemsize
