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

from geojax.models.config import ModelConfig
from geojax.models.lora import LORA_A, is_adapter
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parameters import SINKS, is_score_bias, parameter_shapes

_COLUMNS = ("query", "key", "value", "key_value", "gate", "up", "head")
_ROWS = ("output", "down")


@dataclasses.dataclass(frozen=True)
class Partition:
    """Sharding of one leaf of the parameter tree over the ranks that share the model."""

    axis_by_dim: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Mesh axis by dim of the whole (stacked) leaf; no other dim is sharded."""

    partial: bool = False
    """Each tensor rank holds the leaf unsharded but computes only a part of its gradient."""

    wide: bool = False
    """The leaf is computed with in at least float32, whatever the compute dtype."""


def partitions(config: ModelConfig, parallelism: Parallelism) -> Any:
    """Return the `Partition` of each leaf of `parameter_shapes(config)`."""

    def partition(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Partition:
        names = [entry.key for entry in path]
        axis_by_dim = _tensor_axis_by_dim(names, len(leaf.shape)) if parallelism.tensor > 1 else {}
        if "experts" in names and parallelism.expert > 1:
            axis_by_dim = {1: "expert"} | axis_by_dim
        if _is_of_own_heads(names, config, parallelism):
            return Partition(partial=True)
        # The bias of experts' outputs comes from one rank, before the ranks' outputs are summed. Of
        # an adapter's matrices one is sharded as its kernel is, and the other is met in parts.
        shares_work = parallelism.sequence or is_adapter(path)
        shares_work |= "experts" in names and names[-1] == "bias"
        partial = shares_work and parallelism.tensor > 1 and "tensor" not in axis_by_dim.values()
        return Partition(axis_by_dim, partial, wide=is_score_bias(path))

    return jax.tree_util.tree_map_with_path(partition, parameter_shapes(config))


def is_row_parallel(owner: str) -> bool:
    """Return True if `tensor` shards the inputs of the kernel of the linear layer `owner`."""
    return owner in _ROWS


def _tensor_axis_by_dim(names: list[str], dims: int) -> dict[int, str]:
    owner, kind = names[-2], names[-1]
    if (owner in _COLUMNS and kind != LORA_A) or kind == SINKS:
        return {dims - 1: "tensor"}
    if is_row_parallel(owner) and kind in ("kernel", LORA_A):
        return {dims - 2: "tensor"}
    if owner == "tokens":
        return {0: "tensor"}
    return {}


def _is_of_own_heads(names: list[str], config: ModelConfig, parallelism: Parallelism) -> bool:
    """Return True for an unsharded leaf that each rank of `tensor` applies to its own heads alone.

    They are the norms of queries and keys, and keys and values of fewer heads than ranks: each rank
    slices the head that its queries read out of the unsharded kernel.
    """
    if names[-2] in ("query_norm", "key_norm"):
        return parallelism.tensor > 1
    return names[-2] in ("key", "value") and config.num_key_value_heads < parallelism.tensor
