"""Blocked attention for long sequences: one loop over square tiles, with the online softmax.

The tiles on and below the diagonal are listed in a table, and one `lax.scan` walks it, so the
program's size does not grow with the sequence. Sums of all rows live in the loop's carry, of which
each tile updates one block in place.

    (row, column) blocks:  (0,0)  (1,0) (1,1)  (2,0) (2,1) (2,2)  ...
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.models.attention.tiles import (
    MASKED,
    Sums,
    backward_tile,
    finish,
    forward_tile,
    row_delta,
    visible,
)
from geojax.models.varying import vary_over, varying_axes

Residuals = tuple[Any, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def scanned_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    block: int,
) -> jax.Array:
    """Attention of query [B, K, G, T, D] to key and value [B, K, T, D] in tiles of `block` squared.

    T must be a multiple of `block`.
    """
    return _forward(query, key, value, segment_ids, scale, block)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    block: int,
) -> tuple[jax.Array, Residuals]:
    queries, keys, values, segments = _cut_all(query, key, value, segment_ids, block)

    def visit(sums: Sums, tile: jax.Array) -> tuple[Sums, None]:
        row, column = tile
        after = forward_tile(
            queries[row],
            keys[column],
            values[column],
            _visible(segments, row, column, block),
            scale,
            jax.tree.map(lambda leaf: leaf[row], sums),
        )
        return jax.tree.map(lambda leaf, new: leaf.at[row].set(new), sums, after), None

    wide = jnp.promote_types(query.dtype, jnp.float32)
    column = jnp.zeros((*queries.shape[:-1], 1), wide)
    nothing = Sums(column + MASKED, column, jnp.zeros(queries.shape, wide))
    nothing = vary_over(nothing, varying_axes(query, key, value, segment_ids))
    sums, _ = lax.scan(visit, nothing, _table(queries.shape[0]))
    output, log_sum_exp = finish(sums)
    joined = _join(output.astype(query.dtype), 3)
    return joined, (query, key, value, segment_ids, joined, log_sum_exp)


def _backward(
    scale: float, block: int, residuals: Residuals, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, segment_ids, output, log_sum_exp = residuals
    queries, keys, values, segments = _cut_all(query, key, value, segment_ids, block)
    gradients = _cut(gradient, 3, block)
    deltas = _cut(row_delta(gradient, output), 3, block)

    def visit(sums: list[jax.Array], tile: jax.Array) -> tuple[list[jax.Array], None]:
        row, column = tile
        added = backward_tile(
            queries[row],
            keys[column],
            values[column],
            _visible(segments, row, column, block),
            scale,
            gradients[row],
            log_sum_exp[row],
            deltas[row],
        )
        places = (row, column, column)
        return [s.at[p].add(new) for s, p, new in zip(sums, places, added, strict=True)], None

    wide = log_sum_exp.dtype
    nothing = [jnp.zeros(blocks.shape, wide) for blocks in (queries, keys, values)]
    nothing = vary_over(nothing, varying_axes(residuals, gradient))
    (d_query, d_key, d_value), _ = lax.scan(visit, nothing, _table(queries.shape[0]))
    return (
        _join(d_query, 3).astype(query.dtype),
        _join(d_key, 2).astype(key.dtype),
        _join(d_value, 2).astype(value.dtype),
        None,
    )


scanned_attention.defvjp(_forward, _backward)


def _table(blocks: int) -> jax.Array:
    """int32 [tiles, 2]: row block and column block of every tile that is not above the diagonal."""
    return jnp.asarray(np.argwhere(np.tril(np.ones((blocks, blocks), bool))), jnp.int32)


def _visible(
    segments: jax.Array | None, row: jax.Array, column: jax.Array, block: int
) -> jax.Array:
    inside = jnp.arange(block)
    pair = (None, None) if segments is None else (segments[row], segments[column])
    return visible(row * block + inside, column * block + inside, *pair)


def _cut_all(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    block: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    segments = None if segment_ids is None else _cut(segment_ids, 1, block)
    return _cut(query, 3, block), _cut(key, 2, block), _cut(value, 2, block), segments


def _cut(x: jax.Array, dim: int, block: int) -> jax.Array:
    """[..., T, ...] -> [blocks, ..., block, ...], T being dim `dim`."""
    blocks = x.reshape(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])
    return jnp.moveaxis(blocks, dim, 0)


def _join(blocks: jax.Array, dim: int) -> jax.Array:
    """The inverse of `_cut`."""
    x = jnp.moveaxis(blocks, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
