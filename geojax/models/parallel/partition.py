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

    axes_by_dim: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Mesh axes, the last one fastest, by dim of the whole (stacked) leaf; no other dim is
    sharded."""

    partial: bool = False
    """Each tensor rank holds the leaf unsharded but computes only a part of its gradient."""

    wide: bool = False
    """The leaf is computed with in at least float32, whatever the compute dtype."""

    fp8: bool = False
    """A layer with an FP8 recipe multiplies by the leaf in FP8."""

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that shard the leaf."""
        return frozenset(axis for axes in self.axes_by_dim.values() for axis in axes)


UNPARTITIONED = Partition()


def partitions(config: AnyModel, parallelism: Parallelism) -> Any:
    """Return the `Partition` of each leaf of `parameter_shapes(config)`."""
    axes_of = {
        "tensor": ("tensor",) if parallelism.tensor > 1 else (),
        "expert": ("expert",) if parallelism.expert > 1 else (),
        "vocabulary": parallelism.vocabulary_axes,
    }

    def partition(declaration: Declaration) -> Partition:
        heads = declaration.heads
        if heads is not None and heads < parallelism.tensor:
            return Partition(partial=True, fp8=declaration.fp8)
        named = enumerate(declaration.axes)
        axes_by_dim = {dim: axes_of[name] for dim, name in named if name and axes_of[name]}
        made = Partition(axes_by_dim, wide=declaration.is_wide, fp8=declaration.fp8)
        is_whole = parallelism.tensor > 1 and "tensor" not in made.axes
        partial = is_whole and (parallelism.sequence or declaration.in_parts)
        return dataclasses.replace(made, partial=partial)

    return jax.tree.map(partition, declarations(config))
