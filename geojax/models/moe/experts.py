"""This rank's experts, applied to tokens on this rank."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters
from geojax.models.layers import KernelSharding, activate, operand_axes
from geojax.models.moe.grouped_matmul import Blocks, block_rows, grouped_product, lay_out
from geojax.models.moe.permute import TokenPermutation, permute, unpermute
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.precision import NO_FP8, LinearMatmul

PRODUCT = "expert_product"
"""Name of the result of a grouped matmul, for remat policies."""

_HIGHEST = lax.Precision.HIGHEST  # GPUs otherwise round a float32 product's inputs to 10 bits.


class RoutedTokens(NamedTuple):
    """N tokens for the experts, from any sequences."""

    x: jax.Array
    """[N, H]."""
    experts: jax.Array
    """int32 [N, k], the experts of each; the number of experts stands for none."""
    gates: jax.Array
    """[N, k] in at least float32, the weights of the experts' outputs."""


def apply_experts(
    parameters: Parameters,
    tokens: RoutedTokens,
    config: ModelConfig,
    parallelism: Parallelism = SINGLE_DEVICE,
    matmul: LinearMatmul = NO_FP8,
) -> jax.Array:
    """Sum the outputs of each token's experts, weighted by their gates.

    The gates are multiplied in between an expert's two matmuls, where they commute with the second
    one: their gradient then needs the first matmul's results only, and those of the second are not
    kept for the backward pass.

    Args:
        parameters: the experts' up, down and perhaps gate, with kernels [E, ...] of E experts, and
            perhaps biases.
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
    if config.moe_bias:
        biases = jnp.concatenate([parameters[name]["bias"] for name in names], axis=1)
        first = _add_to_rows(first, biases, blocks)
    up, *gate = jnp.split(first, len(names), axis=1)
    middle = activate(up, gate[0] if gate else None, config)
    weights = permute(tokens.gates.reshape(-1, 1), of_choice)
    middle = (middle * weights).astype(rows.dtype)
    out = unpermute(product(middle, ("down",), "rows"), of_token)
    if not config.moe_bias:
        return out
    bias = parameters["down"]["bias"].astype(out.dtype)
    if parallelism.tensor > 1:  # the ranks' outputs are to be summed
        bias = jnp.where(lax.axis_index("tensor") == 0, bias, 0)
    return out + jnp.matmul(_gate_of_each(tokens, bias.shape[0]), bias, precision=_HIGHEST)


def _add_to_rows(rows: jax.Array, biases: jax.Array, blocks: Blocks) -> jax.Array:
    """Add to each row [S, F] its expert's bias [E, F], in at least float32.

    The backward pass sums the rows of each block, and then the blocks of each expert by a matmul,
    which has one order of summation.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    size = block_rows(blocks.slots.shape[0], biases.shape[0])
    by_block = rows.reshape(-1, size, rows.shape[1])
    numbers = jnp.arange(by_block.shape[0], dtype=jnp.int32)
    expert = jnp.sum(blocks.ends <= numbers[:, None], axis=1)  # of none: the number of experts
    is_of_expert = jax.nn.one_hot(expert, biases.shape[0], dtype=wide)
    of_block = jnp.matmul(is_of_expert, biases.astype(wide), precision=_HIGHEST)
    return (by_block.astype(wide) + of_block[:, None]).astype(rows.dtype).reshape(rows.shape)


def _gate_of_each(tokens: RoutedTokens, experts: int) -> jax.Array:
    """Return the gate of every expert for each token, [N, E]; 0 for those it does not go to."""
    is_chosen = jax.nn.one_hot(tokens.experts, experts, dtype=tokens.gates.dtype)
    return jnp.sum(tokens.gates[..., None] * is_chosen, axis=1)
