"""A check that the compiler made FP8 matrix products of all that a step asks for."""

from typing import Any

import jax

from geojax.errors import UserError
from geojax.hlo.module import parse_module
from geojax.hlo.traffic import program_text
from geojax.models import ModelConfig, parameter_shapes
from geojax.step.plan import StepPlan

_FP8_PRODUCT = 'custom_call_target="__cublas$lt$matmul$f8"'
_PRODUCTS_OF_LINEAR = 3
"""Matrix products of a linear layer: forwards, and two gradients."""


def linear_layers(layers: Any) -> int:
    """Count the linear layers of `layers`, a part of the parameters, that can multiply in FP8.

    The router never does, and the experts multiply quantized operands in the compute dtype.
    """
    if "kernel" in layers:
        return 1
    inner = (below for name, below in layers.items() if name not in ("router", "experts"))
    return sum(linear_layers(below) for below in inner if isinstance(below, dict))


def require_fp8_products(step: jax.stages.Compiled, model: ModelConfig, plan: StepPlan) -> None:
    """Check that each product of a layer that follows the recipe is one of cuBLASLt, in FP8.

    XLA silently multiplies in the compute dtype where cuBLASLt cannot take a product.

    Raises:
        UserError: there are fewer FP8 products than there should be.
        HloParseError: the text of the compiled step cannot be read.
    """
    follow = any(matmul.recipe for _, matmul in plan.matmul.spans(model.num_hidden_layers))
    linear = linear_layers(parameter_shapes(model)["layers"]) if follow else 0
    wanted = _PRODUCTS_OF_LINEAR * linear
    text = program_text(step)
    parse_module(text)
    made = text.count(_FP8_PRODUCT)
    if made < wanted:
        raise UserError(
            f"FP8 on backend xla: of the {wanted} matrix products of a layer XLA made only {made} "
            "in FP8; hidden_size, and a tensor rank's part of intermediate_size and heads, must be "
            "multiples of 16; use fp8.backend reference, or precision bf16"
        )
