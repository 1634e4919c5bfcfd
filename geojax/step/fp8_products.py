"""What a compiler made of the FP8 products that a step asks for."""

from typing import Any

import jax

from geojax.errors import UserError
from geojax.models import ModelConfig, parameter_shapes
from geojax.step.plan import StepPlan

_FP8_PRODUCT = 'custom_call_target="__cublas$lt$matmul$f8"'
_OF_EACH = 3
"""Products of a linear layer: forwards, and two gradients."""


def linear_layers(layers: Any) -> int:
    """How many linear layers of `layers`, a part of the parameters, can be FP8 products.

    The router never is one, and the experts multiply what they rounded in the compute dtype.
    """
    if "kernel" in layers:
        return 1
    inner = (below for name, below in layers.items() if name not in ("router", "experts"))
    return sum(linear_layers(below) for below in inner if isinstance(below, dict))


def require_fp8_products(step: jax.stages.Compiled, model: ModelConfig, plan: StepPlan) -> None:
    """See that each product of a layer that follows the recipe is one of cuBLASLt, in FP8.

    XLA multiplies in the compute dtype, without a word, what it cannot give to cuBLASLt.

    Raises:
        UserError: there are fewer than there should be.
    """
    follow = any(products.recipe for _, products in plan.products.spans(model.num_hidden_layers))
    wanted = _OF_EACH * linear_layers(parameter_shapes(model)["layers"]) if follow else 0
    made = (step.as_text() or "").count(_FP8_PRODUCT)
    if made < wanted:
        raise UserError(
            f"FP8 on backend xla: of the {wanted} matrix products of a layer XLA made only {made} "
            "in FP8; hidden_size, and a tensor rank's part of intermediate_size and heads, must be "
            "multiples of 16; use fp8.backend reference, or precision bf16"
        )
