"""The experts that this rank holds, on tokens that lie here."""

from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from geojax.models.config import ModelConfig
from geojax.models.feed_forward import activate
from geojax.models.mixture.grouped import grouped_product, lay_out
from geojax.models.mixture.permute import Places, collect, spread
from geojax.models.parameters import Parameters

PRODUCT = "expert_product"
"""Name of what a grouped product returns, for rematerialisation policies."""


class Tokens(NamedTuple):
    """What the experts need to know of N tokens, whatever rows they are from."""

    x: jax.Array
    """[N, hidden]."""
    experts: jax.Array
    """int32 [N, k], where each goes; the number of experts stands for none."""
    gates: jax.Array
    """[N, k] in at least float32, what each expert's output is multiplied by."""


def apply_experts(parameters: Parameters, tokens: Tokens, config: ModelConfig) -> jax.Array:
    """The sum of each token's experts, times their gates.

    The gates are multiplied in between an expert's two products, where they commute with the second
    one: their gradient then needs the first product's results only, and those of the second are not
    kept for the backward pass.

    Args:
        parameters: the experts' up, down and perhaps gate, with kernels [E, ...] of E experts.
        tokens: the tokens; `experts` counts those of `parameters`.
        config: the model.

    Returns:
        [N, hidden] in at least float32.
    """
    count, choices = tokens.experts.shape
    blocks = lay_out(tokens.experts.reshape(-1), parameters["down"]["kernel"].shape[0])
    # Of assignments to places, and of tokens to places: a token has `choices` assignments.
    of_choice = Places(blocks.places[:, None], blocks.origins)
    of_token = Places(blocks.places.reshape(count, choices), blocks.origins // choices)
    rows = spread(tokens.x, of_token)

    def product(name: str) -> jax.Array:
        result = grouped_product(rows, parameters[name]["kernel"], blocks)
        return checkpoint_name(result, PRODUCT)

    gate = product("gate") if config.gated else None
    middle = activate(product("up"), gate, config)
    weights = spread(tokens.gates.reshape(-1, 1), of_choice)
    middle = (middle * weights).astype(rows.dtype)
    out = grouped_product(middle, parameters["down"]["kernel"], blocks)
    return collect(out, of_token)
