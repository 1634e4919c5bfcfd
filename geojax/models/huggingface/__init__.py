"""Hugging Face checkpoints: models by their `config.json`, weights in safetensors, both ways."""

from geojax.models.huggingface.adapter import write_adapter
from geojax.models.huggingface.checkpoint import (
    HuggingFaceWeights,
    family_for,
    other_settings,
    read_model_fields,
)
from geojax.models.huggingface.family import Family
from geojax.models.huggingface.tensor_map import Slices, Tensor, TensorMap
from geojax.models.huggingface.write import CheckpointWriter

__all__ = [
    "CheckpointWriter",
    "Family",
    "HuggingFaceWeights",
    "Slices",
    "Tensor",
    "TensorMap",
    "family_for",
    "other_settings",
    "read_model_fields",
    "write_adapter",
]
