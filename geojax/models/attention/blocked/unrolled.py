"""Blocked causal attention of short sequences: every block of query rows is a tile of its own.

rows 0..63      columns 0..63          Each tile is as wide as its rows can see, so its
rows 64..127    columns 0..127         softmax is exact at once, nothing right of the
rows 128..191   columns 0..191         diagonal's block is computed, and every size is
...                                    known to the compiler.

A window's columns begin later, if its size is static; one that only some layers have is masked.
Shapes as in `tiles`, with r = c = S.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from geojax.models.attention.blocked.tiles import (
    backward_tile,
    causal,
    finish,
    forward_tile,
    same_segment,
)
from geojax.models.attention.operands import ScoreRule


def unrolled_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    rule: ScoreRule,
    window: jax.Array | int | None,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Compute output and log-sum-exp of all rows, `block` of them at a time."""
    parts = []
    for tile in _tiles(query.shape[3], window, block):
        allowed = _allowed(segment_ids, tile, window)
        operands = query[:, :, :, tile.rows], key[:, :, tile.columns], value[:, :, tile.columns]
        parts.append(finish(forward_tile(*operands, allowed, rule, None)))
    output, log_sum_exp = (jnp.concatenate(part, axis=3) for part in zip(*parts, strict=True))
    return output, log_sum_exp


def unrolled_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    rule: ScoreRule,
    window: jax.Array | int | None,
    block: int,
    gradient: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of query, key and value; see `backward_tile` for the arguments."""
    d_query: list[jax.Array] = []
    d_key: jax.Array | None = None
    d_value: jax.Array | None = None
    for tile in reversed(list(_tiles(query.shape[3], window, block))):
        rows = (slice(None), slice(None), slice(None), tile.rows)
        columns = (slice(None), slice(None), tile.columns)
        d_rows, d_columns_key, d_columns_value = backward_tile(
            query[rows],
            key[columns],
            value[columns],
            _allowed(segment_ids, tile, window),
            rule,
            gradient[rows],
            log_sum_exp[rows],
            delta[rows],
        )
        d_query.insert(0, d_rows)
        d_key = _add(d_key, d_columns_key, tile)
        d_value = _add(d_value, d_columns_value, tile)
    assert d_key is not None, "a sequence has at least one block"
    assert d_value is not None, "a sequence has at least one block"
    return jnp.concatenate(d_query, axis=3), d_key, d_value


class _Tile(NamedTuple):
    rows: slice
    columns: slice


def _tiles(length: int, window: jax.Array | int | None, block: int) -> Iterator[_Tile]:
    for start in range(0, length, block):
        end = min(start + block, length)
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        yield _Tile(slice(start, end), slice(first, end))


def _allowed(
    segment_ids: jax.Array | None, tile: _Tile, window: jax.Array | int | None
) -> jax.Array:
    row, column = (jnp.arange(each.start, each.stop) for each in tile)
    allowed = causal(row, column, window)
    if segment_ids is None:
        return allowed
    return allowed & same_segment(segment_ids[:, tile.rows], segment_ids[:, tile.columns])


def _add(total: jax.Array | None, share: jax.Array, tile: _Tile) -> jax.Array:
    """Add a tile's gradient of its columns; the first tile added ends with the last column."""
    columns = (slice(None), slice(None), tile.columns)
    if total is not None:
        return total.at[columns].add(share)
    return jnp.pad(share, [(0, 0), (0, 0), (tile.columns.start, 0), (0, 0)])
