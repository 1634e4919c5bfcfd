"""Sharding of each weight over the mesh axes that share a model: tensor and expert.

A matrix whose output feeds an element-wise function is column parallel, the one after it row
parallel, so that only the second's result has to be summed (Shoeybi et al. 2019, "Megatron-LM",
section 3). Each rank of `expert` holds some of the experts, and each expert is sharded over
`tensor` like a dense feed-forward block.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from geojax.models.declaration import Declaration
from geojax.models.own.settings import AnyModel
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parameters import declarations


@dataclasses.dataclass(frozen=True)
class Partition:
    """Sharding of one leaf of the parameter tree over the ranks that share the model."""

    axis_by_dim: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Mesh axis by dim of the whole (stacked) leaf; no other dim is sharded."""

    partial: bool = False
    """Each tensor rank holds the leaf unsharded but computes only a part of its gradient."""

    wide: bool = False
    """The leaf is computed with in at least float32, whatever the compute dtype."""

    fp8: bool = False
    """A layer with an FP8 recipe multiplies by the leaf in FP8."""


UNPARTITIONED = Partition()


def partitions(config: AnyModel, parallelism: Parallelism) -> Any:
    """Return the `Partition` of each leaf of `parameter_shapes(config)`."""
    ranks = {"tensor": parallelism.tensor, "expert": parallelism.expert}

    def partition(declaration: Declaration) -> Partition:
        heads = declaration.heads
        if heads is not None and heads < parallelism.tensor:
            return Partition(partial=True, fp8=declaration.fp8)
        axes = enumerate(declaration.axes)
        axis_by_dim = {dim: axis for dim, axis in axes if axis is not None and ranks[axis] > 1}
        is_whole = parallelism.tensor > 1 and "tensor" not in axis_by_dim.values()
        partial = is_whole and (parallelism.sequence or declaration.in_parts)
        return Partition(axis_by_dim, partial, wide=declaration.is_wide, fp8=declaration.fp8)

    return jax.tree.map(partition, declarations(config))
