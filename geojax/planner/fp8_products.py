"""The FP8 products of compiled programs, counted in their text."""

from collections.abc import Sequence

import jax

from geojax.errors import UserError
from geojax.hlo import HloParseError
from geojax.hlo.module import parse_module
from geojax.hlo.traffic import program_text
from geojax.models import AnyModel
from geojax.models.parameters import declarations
from geojax.step.plan import StepPlan

_FP8_PRODUCT = 'custom_call_target="__cublas$lt$matmul$f8"'
_MATMULS_PER_LINEAR = 3
"""Matrix products of a linear layer: forwards, and two gradients."""


def check_fp8_products(
    programs: Sequence[jax.stages.Compiled], model: AnyModel, plan: StepPlan
) -> str | None:
    """Check what `require_fp8_products` does.

    Returns:
        Why nothing could be checked; None: all is well.

    Raises:
        UserError: there are fewer FP8 products than there should be.
    """
    try:
        require_fp8_products(programs, model, plan)
    except HloParseError as error:
        return str(error)
    return None


def require_fp8_products(
    programs: Sequence[jax.stages.Compiled], model: AnyModel, plan: StepPlan
) -> None:
    """Check that each product of a layer that follows the recipe is one of cuBLASLt, in FP8.

    XLA silently multiplies in the compute dtype where cuBLASLt cannot take a product.

    Args:
        programs: a step, or all that together run a layer forwards and backwards.
        model: the model.
        plan: how they compute.

    Raises:
        UserError: there are fewer FP8 products than there should be.
        HloParseError: the text of a program cannot be read.
    """
    follow = any(matmul.recipe for _, matmul in plan.matmul.spans(model.num_stacked_layers))
    linear = _linear_layers(model) if follow else 0
    wanted = _MATMULS_PER_LINEAR * linear
    made = 0
    for program in programs:
        text = program_text(program)
        parse_module(text)
        made += text.count(_FP8_PRODUCT)
    if made < wanted:
        raise UserError(
            f"FP8 on backend xla: of the {wanted} matrix products of a layer XLA made only {made} "
            "in FP8. Make hidden_size and each tensor rank's share of intermediate_size and heads "
            "multiples of 16, or set fp8.backend to reference or precision to bf16"
        )


def _linear_layers(model: AnyModel) -> int:
    """Count the linear layers of a layer that can multiply in FP8.

    Experts multiply quantized operands in the compute dtype.
    """
    leaves = jax.tree.leaves(declarations(model)["layers"])
    return sum(leaf.fp8 and "expert" not in leaf.axes for leaf in leaves)
