"""Which dtype each part of a training step works in."""

from geojax.precision.backend import BackendChoice, BackendName, chosen_backend
from geojax.precision.linear_matmul import (
    AMAX,
    KEPT_BY_PRODUCTS,
    PLAIN,
    WHOLE,
    Axes,
    Backend,
    Products,
    accumulate,
    is_amax,
    largest_each,
    largest_over,
)
from geojax.precision.loss_scale import LossScale, LossScaleSettings, scale_gradient
from geojax.precision.policy import Policy, PrecisionName, policy, policy_names
from geojax.precision.quantize import Quantised, quantise
from geojax.precision.quantized_weight import (
    RoundedWeight,
    Weight,
    is_rounded,
    join,
    round_weight,
    separate,
)
from geojax.precision.recipes import RECIPES, Format, Recipe

__all__ = [
    "AMAX",
    "KEPT_BY_PRODUCTS",
    "PLAIN",
    "RECIPES",
    "WHOLE",
    "Axes",
    "Backend",
    "BackendChoice",
    "BackendName",
    "Format",
    "LossScale",
    "LossScaleSettings",
    "Policy",
    "PrecisionName",
    "Products",
    "Quantised",
    "Recipe",
    "RoundedWeight",
    "Weight",
    "accumulate",
    "chosen_backend",
    "is_amax",
    "is_rounded",
    "join",
    "largest_each",
    "largest_over",
    "policy",
    "policy_names",
    "quantise",
    "round_weight",
    "scale_gradient",
    "separate",
]
