"""Causal attention behind one seam: cuDNN on GPUs, a blocked implementation anywhere."""

from geojax.models.attention.choice import IMPLEMENTATIONS, Choice, chosen_implementation
from geojax.models.attention.seam import attention

__all__ = ["IMPLEMENTATIONS", "Choice", "attention", "chosen_implementation"]
