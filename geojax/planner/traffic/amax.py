"""What the magnitudes of current scaling send in a layer, by formula: see `geojax.precision`.

Each product with a kernel takes the largest magnitudes of x, w and dy over the ranks that hold
parts of them, a number of 4 bytes for each tensor (experts: one for each expert of the rank):

                               x                 w          dy
    kernel cut by columns      context           tensor     context and tensor
    kernel cut by rows         context, tensor   tensor     context

dy once, x and w in each forward pass. The backward pass runs a part of that again: all of it under
remat "full"; and the one of attention's output under any but "selective", which keeps it. A kernel
that came rounded sends nothing for w, and experts nothing over context, where their tensors end.
"""

import collections
import math
from fractions import Fraction
from typing import Any

import jax

from geojax.hlo.conventions import all_reduce_bytes
from geojax.models.chunk.remat import Remat
from geojax.models.config import ModelConfig
from geojax.models.feed_forward import operand_axes
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.partition import is_cut_by_rows

_NUMBER = 4
"""Bytes: float32."""


def expected_amax_bytes(
    config: ModelConfig, parallelism: Parallelism, rounded: Any, *, remat: Remat = "none"
) -> dict[tuple[str, ...], Fraction]:
    """What one device sends in forward and backward of one layer that follows the recipe.

    Further exchanges of a mixture are not counted.

    Args:
        config: the model.
        parallelism: how it is spread.
        rounded: whether each leaf of the layers came rounded.
        remat: what the forward pass keeps.
    """
    sent: dict[tuple[str, ...], Fraction] = collections.defaultdict(Fraction)
    sizes = {"context": parallelism.context, "tensor": parallelism.tensor}
    for path, came_rounded in jax.tree.leaves_with_path(rounded):
        *blocks, owner, kind = (entry.key for entry in path)
        if kind != "kernel" or owner == "router":
            continue
        numbers, own = 1, parallelism
        if "experts" in blocks:
            numbers = config.num_experts // parallelism.expert
            own = Parallelism(tensor=parallelism.tensor)
        passes = 2 if remat == "full" else 1
        if owner == "output" and remat != "selective":
            passes += 1
        axes = operand_axes(own, "rows" if is_cut_by_rows(owner) else "columns")
        times = {"x": passes, "w": 0 if came_rounded else passes, "dy": 1}
        for operand, over in axes._asdict().items():
            ranks = math.prod(sizes[axis] for axis in over)
            sent[over] += times[operand] * all_reduce_bytes(_NUMBER * numbers, ranks)
    return {axes: count for axes, count in sent.items() if count}
