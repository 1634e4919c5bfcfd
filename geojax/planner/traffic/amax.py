"""Predicted bytes of the amax of FP8 tensors (see `geojax.precision`).

An amax is a number of 4 bytes, the largest magnitude over the ranks that hold parts of a tensor (an
all-reduce):

    delayed scaling    3 numbers for each linear layer and layer, once, over all ranks of a site
                       that share them (`geojax.step.amax_history`)
    current scaling    1 number for each kernel that travels quantized, layer and expert, once, over
                       the ranks that share it (`geojax.step.fp8_all_gather`); and for each product
                       with a kernel one for x, w and dy (experts: one for each expert of the rank):

                               x                 w          dy
    kernel column-parallel     context           tensor     context and tensor
    kernel row-parallel        context, tensor   tensor     context

dy once, x and w in each forward pass. The backward pass runs a part of that again: all of it under
remat "full"; and the one of attention's output under any but "selective", which keeps it. A kernel
that came quantized sends nothing for w, and experts nothing over context, where their tensors end.
Blocks with scales of their own send nothing.
"""

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from geojax.hlo.conventions import all_reduce_bytes
from geojax.models import ModelConfig
from geojax.models.chunk.remat import Remat
from geojax.models.feed_forward import operand_axes
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.partition import is_row_parallel
from geojax.models.parameters import UNQUANTIZED
from geojax.planner.traffic.by_axes import (
    Axes,
    BytesByAxes,
    add,
    layers_of_pass,
    no_bytes,
    passes_of,
    ranks_of,
)
from geojax.planner.traffic.weights import following_spans
from geojax.step.amax_history import history_layouts, shared_axes
from geojax.step.fp8_all_gather import is_fp8_gathered, sharing_axes
from geojax.step.gather import site_shape
from geojax.step.plan import StepPlan

_NUMBER = jnp.dtype(jnp.float32).itemsize


def predicted_amax_bytes(model: ModelConfig, layouts: Any, plan: StepPlan) -> BytesByAxes:
    """Predict the bytes of all amax reductions of one step, but for further exchanges of experts.

    Args:
        model: the model.
        layouts: the `LeafLayout` of each parameter.
        plan: how the step runs.
    """
    sent, recipe = no_bytes(), plan.policy.recipe
    if recipe is None or not recipe.per_tensor:
        return sent
    if recipe.history:
        leaves = jax.tree.leaves(history_layouts(model, plan))
        numbers = sum(math.prod(leaf.model_shard_shape[:3]) for leaf in leaves)
        for axes in shared_axes(plan):
            sent[axes] += all_reduce_bytes(_NUMBER * numbers, ranks_of(axes, plan))
        return sent
    layers = layers_of_pass(model, plan)
    if plan.staged_layers is None:
        layers = 0
        for count, follow, span in following_spans(model, layouts, plan):
            if follow:
                layers += count
                add(sent, _kernels(span, plan))
    quantized = jax.tree_util.tree_map_with_path(
        lambda path, leaf: is_fp8_gathered(path, leaf, plan), layouts["layers"]
    )
    of_layer = predicted_layer_amax_bytes(
        model, plan.parallelism, quantized, remat=plan.layout.remat
    )
    add(sent, of_layer, layers * passes_of(plan))
    return sent


def _kernels(layouts: Any, plan: StepPlan) -> BytesByAxes:
    sent = no_bytes()
    for path, leaf in jax.tree.leaves_with_path(layouts):
        if is_fp8_gathered(path, leaf, plan):
            axes, numbers = sharing_axes(leaf, plan), math.prod(site_shape(leaf, plan)[:-2])
            sent[axes] += all_reduce_bytes(_NUMBER * numbers, ranks_of(axes, plan))
    return sent


def predicted_layer_amax_bytes(
    config: ModelConfig, parallelism: Parallelism, quantized: Any, *, remat: Remat = "none"
) -> dict[Axes, Fraction]:
    """Predict the bytes of forward and backward of one layer that follows the recipe.

    Further exchanges of an MoE layer are not counted.

    Args:
        config: the model.
        parallelism: how the mesh splits it.
        quantized: for each leaf of a layer True if it came quantized.
        remat: the rematerialization policy.
    """
    sent = no_bytes()
    sizes = {"context": parallelism.context, "tensor": parallelism.tensor}
    for path, came_quantized in jax.tree.leaves_with_path(quantized):
        *blocks, owner, kind = (entry.key for entry in path)
        if kind != "kernel" or owner in UNQUANTIZED:
            continue
        numbers, own = 1, parallelism
        if "experts" in blocks:
            assert config.is_moe, "a layer with experts must be of a model that has them"
            numbers = config.num_experts // parallelism.expert
            own = Parallelism(tensor=parallelism.tensor)
        passes = 2 if remat == "full" else 1
        if owner == "output" and remat != "selective":
            passes += 1
        axes = operand_axes(own, "rows" if is_row_parallel(owner) else "columns")
        times = {"x": passes, "w": 0 if came_quantized else passes, "dy": 1}
        for operand, over in axes._asdict().items():
            ranks = math.prod(sizes[axis] for axis in over)
            sent[over] += times[operand] * all_reduce_bytes(_NUMBER * numbers, ranks)
    return {axes: count for axes, count in sent.items() if count}
