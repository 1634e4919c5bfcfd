"""Checkpoints (asynchronous, atomic, checksummed, restored onto any mesh) and run directories."""

from geojax.checkpoint.checkpointer import Checkpointer
from geojax.checkpoint.run_directory import RunDirectory

__all__ = ["Checkpointer", "RunDirectory"]
