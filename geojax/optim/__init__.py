"""Optax chains on shards of the training state."""

from geojax.optim.clip import clip_by_global_norm, global_norm
from geojax.optim.optimizer import OptimizerSettings, make_optimizer, optimizer_layouts
from geojax.optim.optimizer_state import apply_updates, keep_on_skipped_steps, select
from geojax.optim.registry import OPTIMIZERS
from geojax.optim.schedules import SCHEDULES, learning_rate_schedule
from geojax.optim.sync_across_sites import sync_across_sites

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "OptimizerSettings",
    "apply_updates",
    "clip_by_global_norm",
    "global_norm",
    "keep_on_skipped_steps",
    "learning_rate_schedule",
    "make_optimizer",
    "optimizer_layouts",
    "select",
    "sync_across_sites",
]
