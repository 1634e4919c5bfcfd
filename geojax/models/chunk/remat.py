"""Rematerialization: the choice of residuals that a layer's forward keeps for its backward."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from geojax.collectives import after, barrier, token_of
from geojax.errors import UserError
from geojax.models.moe import SAVEABLE_MOE
from geojax.models.parallel.tensor import TP_COPIED, TP_REDUCED
from geojax.precision import SAVEABLE_MATMULS

Remat = Literal["none", "selective", "full"]
"""The residuals that the forward pass of a layer keeps for the backward pass.

none: recomputes nothing costly and sends nothing twice. It keeps the results of matrix products,
the residuals of attention, and the residual stream on entering and on leaving the products that
ranks of `tensor` share (with sequence parallelism the gathered positions, as large as without it).

selective: drops the residuals of attention and runs its forward pass again, messages over `context`
included, as in Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models"). With sequence parallelism it keeps a rank's own positions alone, and gathers the
others again: all that it keeps is 1 / tensor of the whole.

full: keeps the layer's input only. The forward pass runs again with all of its messages, but for
the last sum over `tensor`, which no gradient needs.
"""


def computed_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a derivative of `function` that keeps its arguments alone, and runs it once more.

    It runs again when the cotangent of its result is there. With `jax.checkpoint` alone, XLA's CPU
    runtime may issue the collectives of the second run at any time, or merge it with the first.
    The first argument is data without a derivative. `function` must close over no array: the
    backward may be a program of its own.
    """

    @jax.custom_vjp
    def apply(data: Any, *arguments: Any) -> Any:
        return function(data, *arguments)

    def forward(data: Any, *arguments: Any) -> tuple[Any, Any]:
        return function(data, *arguments), (data, arguments)

    def backward(kept: Any, cotangent: Any) -> Any:
        (data, arguments), cotangent = barrier((kept, cotangent))
        arguments = after(arguments, token_of(cotangent))
        _, of_arguments = jax.vjp(functools.partial(function, data), *arguments)
        return None, *of_arguments(cotangent)

    apply.defvjp(forward, backward)
    return apply


def rematerialize(
    function: Callable[..., Any], remat: Remat, *, keep_all_names: bool = False
) -> Callable[..., Any]:
    """Make a derivative of `function` that keeps the residuals of policy `remat`.

    Its forward and its backward must not stand side by side in one computation (they do not where
    either is the body of a loop), or the compiler would merge the one's results into the other.

    Args:
        function: a layer.
        remat: the policy.
        keep_all_names: "selective" keeps all that the function names by `checkpoint_name`, but for
            streams that ranks of `tensor` gathered.

    Raises:
        UserError: `remat` is unknown.
    """
    if remat == "none":
        return function
    checkpoint: Callable[..., Any] = functools.partial(jax.checkpoint, prevent_cse=False)
    if remat == "full":
        return checkpoint(function)
    if remat == "selective":
        policies = jax.checkpoint_policies
        products = policies.dots_with_no_batch_dims_saveable
        named = policies.save_only_these_names(TP_REDUCED, *SAVEABLE_MOE, *SAVEABLE_MATMULS)
        if keep_all_names:
            named = policies.save_any_names_but_these(TP_COPIED)
        return checkpoint(function, policy=policies.save_from_both_policies(products, named))
    raise UserError(f"remat '{remat}' is unknown; it can be none, selective or full")
