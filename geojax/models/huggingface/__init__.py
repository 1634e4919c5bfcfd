"""Hugging Face checkpoints: models by their `config.json`, weights in safetensors, both ways.

Each name is imported from its module when it is first used: a run reads checkpoints, and writes
none.
"""

from typing import TYPE_CHECKING

from geojax.lazy_names import importer

if TYPE_CHECKING:
    from geojax.models.huggingface.adapter import write_adapter as write_adapter
    from geojax.models.huggingface.checkpoint import HuggingFaceWeights as HuggingFaceWeights
    from geojax.models.huggingface.checkpoint import family_for as family_for
    from geojax.models.huggingface.checkpoint import other_settings as other_settings
    from geojax.models.huggingface.checkpoint import read_model_fields as read_model_fields
    from geojax.models.huggingface.family import Family as Family
    from geojax.models.huggingface.tensor_map import Slices as Slices
    from geojax.models.huggingface.tensor_map import Tensor as Tensor
    from geojax.models.huggingface.tensor_map import TensorMap as TensorMap
    from geojax.models.huggingface.write import CheckpointWriter as CheckpointWriter

_MODULES = {
    "CheckpointWriter": "geojax.models.huggingface.write",
    "Family": "geojax.models.huggingface.family",
    "HuggingFaceWeights": "geojax.models.huggingface.checkpoint",
    "Slices": "geojax.models.huggingface.tensor_map",
    "Tensor": "geojax.models.huggingface.tensor_map",
    "TensorMap": "geojax.models.huggingface.tensor_map",
    "family_for": "geojax.models.huggingface.checkpoint",
    "other_settings": "geojax.models.huggingface.checkpoint",
    "read_model_fields": "geojax.models.huggingface.checkpoint",
    "write_adapter": "geojax.models.huggingface.adapter",
}

__getattr__ = importer(__name__, _MODULES)
