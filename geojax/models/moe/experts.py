"""This rank's experts, applied to tokens on this rank."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from geojax.models.config import ModelConfig
from geojax.models.feed_forward import KernelSharding, activate, operand_axes
from geojax.models.moe.grouped_matmul import grouped_product, lay_out
from geojax.models.moe.permute import TokenPermutation, permute, unpermute
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.parameters import Parameters
from geojax.precision import NO_FP8, LinearMatmul

PRODUCT = "expert_product"
"""Name of the result of a grouped matmul, for remat policies."""


class Tokens(NamedTuple):
    """N tokens for the experts, from any sequences."""

    x: jax.Array
    """[N, H]."""
    experts: jax.Array
    """int32 [N, k], the experts of each; the number of experts stands for none."""
    gates: jax.Array
    """[N, k] in at least float32, the weights of the experts' outputs."""


def apply_experts(
    parameters: Parameters,
    tokens: Tokens,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """Sum the outputs of each token's experts, weighted by their gates.

    The gates are multiplied in between an expert's two matmuls, where they commute with the second
    one: their gradient then needs the first matmul's results only, and those of the second are not
    kept for the backward pass.

    Args:
        parameters: the experts' up, down and perhaps gate, with kernels [E, ...] of E experts.
        tokens: the tokens; `experts` counts those of `parameters`.
        config: the model.
        parallelism: how the experts' width is sharded.
        matmul: matmul of the experts.

    Returns:
        [N, H] in at least float32.
    """
    # Tokens of other ranks of `context` are other tensors to an expert.
    parallelism = Parallelism(tensor=parallelism.tensor)
    count, choices = tokens.experts.shape
    blocks = lay_out(tokens.experts.reshape(-1), parameters["down"]["kernel"].shape[0])
    # Slots of choices, and slots of tokens: a token has `choices` of them.
    of_choice = TokenPermutation(blocks.slots[:, None], blocks.origins)
    of_token = TokenPermutation(blocks.slots.reshape(count, choices), blocks.origins // choices)
    rows = permute(tokens.x, of_token)

    def product(rows: jax.Array, names: tuple[str, ...], sharding: KernelSharding) -> jax.Array:
        kernels = tuple(parameters[name]["kernel"] for name in names)
        amax = tuple(parameters[name].get("amax") for name in names)
        axes = operand_axes(parallelism, sharding)
        return grouped_product(rows, kernels, blocks, matmul, amax, axes)

    names = ("up", "gate") if config.gated else ("up",)
    first = checkpoint_name(product(rows, names, "columns"), PRODUCT)
    up, *gate = jnp.split(first, len(names), axis=1)
    middle = activate(up, gate[0] if gate else None, config)
    weights = permute(tokens.gates.reshape(-1, 1), of_choice)
    middle = (middle * weights).astype(rows.dtype)
    return unpermute(product(middle, ("down",), "rows"), of_token)
