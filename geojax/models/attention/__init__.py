"""Causal attention: one function, cuDNN on GPUs, a blocked implementation anywhere."""

from geojax.models.attention.api import attention
from geojax.models.attention.context.methods import context_unsupported_reason
from geojax.models.attention.select import chosen_implementation

__all__ = [
    "attention",
    "chosen_implementation",
    "context_unsupported_reason",
]
