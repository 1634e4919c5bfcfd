"""The block kernel in plain JAX, for any backend and dtype: memory linear in the sequence.

The score matrix is computed tile by tile and never kept; the backward pass computes it again from
the log-sum-exp of its rows. Tiles above the diagonal, or wholly outside of a window, are not
visited.
"""

import jax
import jax.numpy as jnp

from geojax.models.attention.blocked.blocks import Block, BlockGradients, Partial
from geojax.models.attention.blocked.scanned import (
    TileWalk,
    causal_walk,
    full_walk,
    scanned_backward,
    scanned_forward,
)
from geojax.models.attention.blocked.tiles import row_delta
from geojax.models.attention.blocked.unrolled import unrolled_backward, unrolled_forward
from geojax.models.attention.operands import ScoreRule

LONGEST_UNROLLED = 1024
"""Causal blocks up to here are unrolled, longer ones scanned."""

UNROLLED_BLOCK = 64
"""Query rows of an unrolled tile. Smaller computes less right of the diagonal, larger has larger
matmuls; measured on the CPU with heads of 64 dims."""

SCANNED_BLOCK = 256
"""Most rows and columns of a scanned tile."""


class TiledKernel:
    """Tiled `Kernel` (see `geojax.models.attention.blocked.blocks`).

    Scores, softmax and sums are in at least float32 (float64 for float64 inputs); probabilities are
    rounded to the inputs' dtype before they are multiplied with the values, as FlashAttention does.
    """

    def forward(self, block: Block, rule: ScoreRule) -> Partial:
        """Attend with the block's queries to its keys."""
        operands = _operands(block)
        if _unrolled(block):
            output, log_sum_exp = unrolled_forward(
                *operands, block.query_segments, rule, block.visible_keys(rule), UNROLLED_BLOCK
            )
        else:
            walk = _walk(block, rule)
            output, log_sum_exp = scanned_forward(*_padded(operands, walk.block), walk, rule)
        length = block.query.shape[1]
        return Partial(_ungrouped(output)[:, :length], _ungrouped(log_sum_exp)[:, :length])

    def backward(
        self,
        block: Block,
        rule: ScoreRule,
        output: jax.Array,
        log_sum_exp: jax.Array,
        gradient: jax.Array,
    ) -> BlockGradients:
        """Compute the block's contribution to the gradients."""
        operands = _operands(block)
        key_heads = block.key.shape[2]
        saved = tuple(
            _grouped(x, key_heads) for x in (gradient, log_sum_exp, row_delta(gradient, output))
        )
        if _unrolled(block):
            d_query, d_key, d_value = unrolled_backward(
                *operands,
                block.query_segments,
                rule,
                block.visible_keys(rule),
                UNROLLED_BLOCK,
                *saved,
            )
        else:
            walk = _walk(block, rule)
            saved = tuple(_pad(x, 3, walk.block) for x in saved)
            operands = _padded(operands, walk.block)
            d_query, d_key, d_value = scanned_backward(*operands, walk, rule, *saved)
        return BlockGradients(
            _ungrouped(d_query)[:, : block.query.shape[1]],
            d_key.transpose(0, 2, 1, 3)[:, : block.key.shape[1]],
            d_value.transpose(0, 2, 1, 3)[:, : block.key.shape[1]],
        )


TILED = TiledKernel()
"""The tiled kernel, which has no settings."""


def _unrolled(block: Block) -> bool:
    return block.causal and block.query.shape[1] <= LONGEST_UNROLLED


def _walk(block: Block, rule: ScoreRule) -> TileWalk:
    rows, columns = block.query.shape[1], block.key.shape[1]
    # Tiles of equal size leave the least to pad.
    size = -(-rows // -(-rows // SCANNED_BLOCK))
    segments = None
    if block.query_segments is not None and block.key_segments is not None:
        segments = _pad(block.query_segments, 1, size), _pad(block.key_segments, 1, size)
    window = block.visible_keys(rule)
    if block.causal:
        # Padding comes after every real position, where causality hides it.
        return causal_walk(rows + -rows % size, window, segments, size)
    count = columns if block.key_count is None else block.key_count
    return full_walk(rows + -rows % size, columns + -columns % size, count, window, segments, size)


def _operands(block: Block) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return query [B, K, G, q, D], key and value [B, K, k, D], as contiguous matrices.

    The G query heads of a group share one matmul with their key head.
    """
    key_heads = block.key.shape[2]
    key, value = (x.transpose(0, 2, 1, 3) for x in (block.key, block.value))
    return _grouped(block.query, key_heads), key, value


def _grouped(x: jax.Array, key_heads: int) -> jax.Array:
    """Group query heads by kv head: [B, q, N, D] to [B, K, G, q, D]."""
    rows, length, heads, size = x.shape
    x = x.reshape(rows, length, key_heads, heads // key_heads, size)
    return x.transpose(0, 2, 3, 1, 4)


def _ungrouped(x: jax.Array) -> jax.Array:
    """Invert `_grouped`."""
    x = x.transpose(0, 3, 1, 2, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[4])


def _padded(
    operands: tuple[jax.Array, jax.Array, jax.Array], block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query, key, value = operands
    return _pad(query, 3, block), _pad(key, 2, block), _pad(value, 2, block)


def _pad(x: jax.Array, dim: int, block: int) -> jax.Array:
    """Pad `x` with zeros at the end of `dim`, up to a multiple of `block`."""
    padding = -x.shape[dim] % block
    if not padding:
        return x
    return jnp.pad(x, [(0, padding if i == dim else 0) for i in range(x.ndim)])
