"""Causal attention behind one seam: cuDNN on GPUs, a blocked implementation anywhere."""

from geojax.models.attention.choice import IMPLEMENTATIONS, Choice, chosen_implementation
from geojax.models.attention.context import context_obstacle
from geojax.models.attention.context_traffic import ContextBytes, expected_context_bytes
from geojax.models.attention.seam import attention

__all__ = [
    "IMPLEMENTATIONS",
    "Choice",
    "ContextBytes",
    "attention",
    "chosen_implementation",
    "context_obstacle",
    "expected_context_bytes",
]
