"""Causal attention behind one seam: cuDNN on GPUs, a blocked implementation anywhere."""

from geojax.models.attention.seam import IMPLEMENTATIONS, attention

__all__ = ["IMPLEMENTATIONS", "attention"]
