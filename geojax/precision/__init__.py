"""Precision: dtype policies, loss scaling, FP8 recipes and the matmuls of linear layers."""

from geojax.precision.backend import BackendChoice, BackendName, chosen_backend
from geojax.precision.linear_matmul import (
    AMAX,
    NO_FP8,
    SAVEABLE_MATMULS,
    UNSHARDED,
    Axes,
    Backend,
    LinearMatmul,
    accumulate,
    attach_amax,
    detach_amax,
    largest_each,
    largest_over,
    saveable,
)
from geojax.precision.loss_scale import LossScale, LossScaleSettings, scale_gradient
from geojax.precision.policy import Policy, policy
from geojax.precision.quantize import quantize
from geojax.precision.quantized_weight import (
    QuantizedWeight,
    Weight,
    is_quantized_weight,
    merge_quantized,
    quantize_weight,
    split_quantized,
)
from geojax.precision.recipes import RECIPES, Format, Recipe

__all__ = [
    "AMAX",
    "NO_FP8",
    "RECIPES",
    "SAVEABLE_MATMULS",
    "UNSHARDED",
    "Axes",
    "Backend",
    "BackendChoice",
    "BackendName",
    "Format",
    "LinearMatmul",
    "LossScale",
    "LossScaleSettings",
    "Policy",
    "QuantizedWeight",
    "Recipe",
    "Weight",
    "accumulate",
    "attach_amax",
    "chosen_backend",
    "detach_amax",
    "is_quantized_weight",
    "largest_each",
    "largest_over",
    "merge_quantized",
    "policy",
    "quantize",
    "quantize_weight",
    "saveable",
    "scale_gradient",
    "split_quantized",
]
