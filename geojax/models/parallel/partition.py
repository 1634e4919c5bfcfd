"""Sharding of each weight over the mesh axes that share a model: tensor and expert.

A matrix whose output feeds an element-wise function is cut by columns, the one after it by rows, so
that only the second's result has to be summed (Shoeybi et al. 2019, "Megatron-LM", section 3). The
experts are dealt out whole over `expert`, and each is sharded over `tensor` like a dense
feed-forward block.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from geojax.models.config import ModelConfig
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parameters import parameter_shapes

_COLUMNS = ("query", "key", "value", "gate", "up", "head")
_ROWS = ("output", "down")


@dataclasses.dataclass(frozen=True)
class Partition:
    """Sharding of one leaf of the parameter tree over the ranks that share the model."""

    cuts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Mesh axis by dim of the whole (stacked) leaf; no other dim is sharded."""

    partial: bool = False
    """Each tensor rank holds the leaf unsharded but computes only a part of its gradient."""


def partitions(config: ModelConfig, parallelism: Parallelism) -> Any:
    """Return the `Partition` of each leaf of `parameter_shapes(config)`."""

    def partition(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Partition:
        names = [entry.key for entry in path]
        cuts = _tensor_cuts(names, len(leaf.shape)) if parallelism.tensor > 1 else {}
        if "experts" in names and parallelism.expert > 1:
            cuts = {1: "expert"} | cuts
        if _is_whole_head(names, config, parallelism):
            return Partition(partial=True)
        shares_stream = parallelism.sequence and parallelism.tensor > 1
        return Partition(cuts, partial=shares_stream and "tensor" not in cuts.values())

    return jax.tree_util.tree_map_with_path(partition, parameter_shapes(config))


def is_cut_by_rows(owner: str) -> bool:
    """Return True if `tensor` shards the rows of the kernel of the linear layer `owner`."""
    return owner in _ROWS


def _tensor_cuts(names: list[str], dims: int) -> dict[int, str]:
    owner, kind = names[-2], names[-1]
    if owner in _COLUMNS:
        return {dims - 1: "tensor"}
    if is_cut_by_rows(owner) and kind == "kernel":
        return {dims - 2: "tensor"}
    if owner == "tokens":
        return {0: "tensor"}
    return {}


def _is_whole_head(names: list[str], config: ModelConfig, parallelism: Parallelism) -> bool:
    """Return True for keys and values of fewer heads than ranks.

    Each rank slices the head that its queries read out of the whole kernel.
    """
    return names[-2] in ("key", "value") and config.num_key_value_heads < parallelism.tensor
