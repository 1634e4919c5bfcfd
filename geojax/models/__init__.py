"""Decoder-only transformers as functions on plain parameter trees."""

from geojax.models.config import MixtureSettings, ModelConfig, RotaryScaling
from geojax.models.flops import model_flops
from geojax.models.generate import generate
from geojax.models.linen import Transformer
from geojax.models.parameters import (
    Parameters,
    active_parameter_count,
    decay_mask,
    init_parameters,
    parameter_count,
    parameter_shapes,
)
from geojax.models.remat import Remat
from geojax.models.transformer import Batch, logits, loss_sum

__all__ = [
    "Batch",
    "MixtureSettings",
    "ModelConfig",
    "Parameters",
    "Remat",
    "RotaryScaling",
    "Transformer",
    "active_parameter_count",
    "decay_mask",
    "generate",
    "init_parameters",
    "logits",
    "loss_sum",
    "model_flops",
    "parameter_count",
    "parameter_shapes",
]
