"""The place of each leaf of the training state: its shards on a mesh, and its layers by stage."""

from geojax.sharding.leaf_layouts import (
    SHARD_AXES,
    DimSharding,
    LeafLayout,
    bytes_per_device,
    leaf_layout,
)
from geojax.sharding.stage_assignment import StageAssignment

__all__ = [
    "SHARD_AXES",
    "DimSharding",
    "LeafLayout",
    "StageAssignment",
    "bytes_per_device",
    "leaf_layout",
]
