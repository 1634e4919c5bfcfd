"""Blocked causal attention with an online softmax, in plain JAX, for any backend and dtype.

The score matrix is walked in tiles of `rows of queries x columns of keys`, so that only one tile of
scores is alive at a time, and tiles above the diagonal are not visited. The backward pass
recomputes each tile of probabilities from the saved log-sum-exp of its rows.

Source: T. Dao, "FlashAttention-2" (arXiv:2307.08691), algorithms 1 and 2; the online softmax is
M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 128
"""Rows of a tile, and the unit in which its columns are counted."""

# Finite, so that a row which a whole tile masks gives exp(0) and not exp(inf - inf); the next tile
# that the row may see then weighs that garbage with exp(-1e30 - maximum) = 0.
MASKED = -1e30


class Tile(NamedTuple):
    """Query rows [row, row_end) against key columns [column, column_end)."""

    row: int
    row_end: int
    column: int
    column_end: int


def blocked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    *,
    block: int = BLOCK,
) -> jax.Array:
    """Causal attention whose memory grows linearly with the sequence.

    Shapes as in `geojax.models.attention.attention`. Scores, softmax and all sums are in at least
    float32; float64 inputs are computed in float64.
    """
    rows, length, heads, head_size = query.shape
    groups = key.shape[2]
    # [B, K, G, T, D] against [B, K, T, D]: the products contract over contiguous matrices, and
    # the G query heads of a group share one product with their key head.
    query = query.reshape(rows, length, groups, heads // groups, head_size)
    output = _attention(
        query.transpose(0, 2, 3, 1, 4),
        key.transpose(0, 2, 1, 3),
        value.transpose(0, 2, 1, 3),
        segment_ids,
        scale,
        block,
    )
    return output.transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(query, key, value, segment_ids, scale, block):  # type: ignore[no-untyped-def]
    return _forward(query, key, value, segment_ids, scale, block)[0]


def _forward(query, key, value, segment_ids, scale, block):  # type: ignore[no-untyped-def]
    length = query.shape[3]
    output, log_sum_exp = [], []
    for start in range(0, length, block):
        end = min(start + block, length)
        scores = _scores(query, key, segment_ids, scale, Tile(start, end, 0, end))
        maximum = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - maximum)
        total = weights.sum(axis=-1, keepdims=True)
        block_output = _product("bkgts,bksd->bkgtd", weights, value[:, :, :end])
        output.append((block_output / total).astype(query.dtype))
        log_sum_exp.append(maximum + jnp.log(total))
    output = jnp.concatenate(output, axis=3)
    log_sum_exp = jnp.concatenate(log_sum_exp, axis=3)
    return output, (query, key, value, segment_ids, output, log_sum_exp)


def _backward(scale, block, saved, gradient):  # type: ignore[no-untyped-def]
    query, key, value, segment_ids, output, log_sum_exp = saved
    length = query.shape[3]
    compute = log_sum_exp.dtype
    # delta = rowsum(dO * O) = rowsum(P * dP): the softmax's own gradient term.
    delta = jnp.sum(gradient.astype(compute) * output.astype(compute), axis=-1, keepdims=True)
    d_query = []
    d_key = jnp.zeros_like(key, compute)
    d_value = jnp.zeros_like(value, compute)
    for start in range(0, length, block):
        end = min(start + block, length)
        tile = Tile(start, end, 0, end)
        here = (slice(None), slice(None), slice(None), slice(start, end))
        scores = _scores(query, key, segment_ids, scale, tile)
        weights = jnp.exp(scores - log_sum_exp[here])
        d_weights = _product("bkgtd,bksd->bkgts", gradient[here], value[:, :, :end])
        d_scores = weights * (d_weights - delta[here]) * scale
        d_query.append(_product("bkgts,bksd->bkgtd", d_scores, key[:, :, :end]).astype(query.dtype))
        d_key = d_key.at[:, :, :end].add(_product("bkgts,bkgtd->bksd", d_scores, query[here]))
        d_value = d_value.at[:, :, :end].add(_product("bkgts,bkgtd->bksd", weights, gradient[here]))
    d_query = jnp.concatenate(d_query, axis=3)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), _no_gradient(segment_ids)


_attention.defvjp(_forward, _backward)


def _scores(query, key, segment_ids, scale, tile):  # type: ignore[no-untyped-def]
    scores = scale * _product(
        "bkgtd,bksd->bkgts",
        query[:, :, :, tile.row : tile.row_end],
        key[:, :, tile.column : tile.column_end],
    )
    row = jnp.arange(tile.row, tile.row_end)[:, None]
    column = jnp.arange(tile.column, tile.column_end)[None, :]
    allowed = row >= column
    if segment_ids is not None:
        row_segment = segment_ids[:, tile.row : tile.row_end, None]
        column_segment = segment_ids[:, None, tile.column : tile.column_end]
        allowed = allowed & (row_segment == column_segment)[:, None, None]
    return jnp.where(allowed, scores, MASKED)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """A matrix product of inputs in `right`'s dtype, summed in at least float32."""
    compute = jnp.promote_types(right.dtype, jnp.float32)
    return jnp.einsum(equation, left.astype(right.dtype), right, preferred_element_type=compute)


def _no_gradient(segment_ids: jax.Array | None) -> np.ndarray | None:
    if segment_ids is None:
        return None
    return np.zeros(segment_ids.shape, jax.dtypes.float0)
