"""Optax chains on shards, and where each leaf of the training state lives."""

from geojax.optim.clip import clip_by_global_norm, global_norm
from geojax.optim.layout import (
    SHARD_AXES,
    DimSharding,
    LeafLayout,
    abstract,
    bytes_per_device,
    leaf_layout,
    parameter_layouts,
    replicated,
    shardings,
)
from geojax.optim.optimizer import (
    OptimizerSettings,
    make_optimizer,
    optimizer_layouts,
)
from geojax.optim.registry import OPTIMIZERS
from geojax.optim.schedules import SCHEDULES, learning_rate_schedule
from geojax.optim.skipped_steps import apply_updates, keep_on_skipped_steps, select
from geojax.optim.stage_assignment import StageAssignment
from geojax.optim.sync_across_sites import sync_across_sites

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "SHARD_AXES",
    "DimSharding",
    "LeafLayout",
    "OptimizerSettings",
    "StageAssignment",
    "abstract",
    "apply_updates",
    "bytes_per_device",
    "clip_by_global_norm",
    "global_norm",
    "keep_on_skipped_steps",
    "leaf_layout",
    "learning_rate_schedule",
    "make_optimizer",
    "optimizer_layouts",
    "parameter_layouts",
    "replicated",
    "select",
    "shardings",
    "sync_across_sites",
]
