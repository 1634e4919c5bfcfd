"""Blocked causal attention in plain JAX, for any backend and dtype: memory linear in the sequence.

The score matrix is computed tile by tile and never kept; the backward pass computes it again from
the saved log-sum-exp of its rows. Tiles above the diagonal are not visited.
"""

import jax
import jax.numpy as jnp

from geojax.models.attention.scanned import scanned_attention
from geojax.models.attention.unrolled import unrolled_attention
from geojax.models.varying import vary_over, varying_axes

LONGEST_UNROLLED = 1024
"""Sequences up to here are unrolled, longer ones scanned."""

UNROLLED_BLOCK = 64
"""Query rows of an unrolled tile. Smaller computes less right of the diagonal, larger makes larger
matrix products; measured on the CPU with heads of 64 dims."""

SCANNED_BLOCK = 256
"""Rows and columns of a scanned tile."""


def blocked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
) -> jax.Array:
    """Causal attention without the score matrix; shapes as in `attention`.

    Scores, softmax and sums are in at least float32 (float64 for float64 inputs); probabilities are
    rounded to the inputs' dtype before they are multiplied with the values, as FlashAttention does.
    """
    rows, length, heads, head_size = query.shape
    groups = key.shape[2]
    if length <= LONGEST_UNROLLED:
        implementation, block, padding = unrolled_attention, UNROLLED_BLOCK, 0
    else:
        # Padding comes after every real position, where causality hides it.
        implementation, block, padding = scanned_attention, SCANNED_BLOCK, -length % SCANNED_BLOCK
    query, key, value, segment_ids = vary_over(
        (query, key, value, segment_ids), varying_axes(query, key, value, segment_ids)
    )
    if padding:
        query, key, value = (_pad(x, padding) for x in (query, key, value))
        segment_ids = None if segment_ids is None else _pad(segment_ids, padding)
    # [B, K, G, T, D] against [B, K, T, D]: contiguous matrices, and the G query heads of a group
    # share one product with their key head.
    query = query.reshape(rows, length + padding, groups, heads // groups, head_size)
    output = implementation(
        query.transpose(0, 2, 3, 1, 4),
        key.transpose(0, 2, 1, 3),
        value.transpose(0, 2, 1, 3),
        segment_ids,
        scale,
        block,
    )
    output = output.transpose(0, 3, 1, 2, 4)[:, :length]
    return output.reshape(rows, length, heads, head_size)


def _pad(x: jax.Array, count: int) -> jax.Array:
    """`x` [B, T, ...] with `count` zeros after its positions."""
    return jnp.pad(x, [(0, 0), (0, count)] + [(0, 0)] * (x.ndim - 2))
