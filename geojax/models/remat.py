"""Rematerialisation: what the forward pass of a layer keeps for its backward pass."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax

from geojax.errors import UserError
from geojax.models.mixture import KEPT_BY_MIXTURE
from geojax.models.tensor_parallel import LEFT

Remat = Literal["none", "selective", "full"]
"""What the forward pass of a layer keeps for the backward pass. "none" recomputes nothing costly:
it keeps the results of matrix products and what attention saves. "selective" drops the latter and
runs attention's forward pass again, as in Korthikanti et al. 2022 ("Reducing Activation
Recomputation in Large Transformer Models"). "full" keeps the layer's input only."""


def rematerialised(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`function`, whose derivative keeps what `remat` says.

    Its forward and its backward must not stand side by side in one computation (they do not where
    either is the body of a loop), or the compiler would merge the one's results into the other.

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
        named = policies.save_only_these_names(LEFT, *KEPT_BY_MIXTURE)
        return checkpoint(function, policy=policies.save_from_both_policies(products, named))
    raise UserError(f"remat '{remat}' is unknown; it can be none, selective or full")
