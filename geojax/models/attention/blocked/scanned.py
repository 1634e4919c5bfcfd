"""Blocked attention of long sequences: one loop over square tiles, with the online softmax.

The tiles that count are listed in a table and one loop walks it, so the program's size does not
grow with the sequence. The sums of all rows are the loop's carry, of which each tile updates one
block in place. Shapes as in `tiles`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.models.attention.blocked.tiles import (
    MASKED,
    Sums,
    backward_tile,
    causal,
    finish,
    forward_tile,
    same_segment,
)
from geojax.models.attention.operands import ScoreRule
from geojax.models.parallel.varying import vary_over, varying_axes

Gradients = tuple[jax.Array, jax.Array, jax.Array]
Segments = tuple[jax.Array, jax.Array] | None
"""Segments int32 [B, r] of the rows and [B, c] of the columns; None: each sequence is one."""


class TileWalk(NamedTuple):
    """Order of the visited tiles, and the mask of their scores."""

    block: int
    """Rows and columns of a tile; r and c are multiples of it."""

    tiles: jax.Array | int
    """Number of visited tiles."""

    tile: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    """Function from a tile's number on the walk to its row and column, counted in tiles."""

    allowed: Callable[[jax.Array, jax.Array], jax.Array | None]
    """Function from a tile's row and column to the mask `allowed` of `forward_tile`."""


def causal_walk(
    length: int, window: jax.Array | int | None, segments: Segments, block: int
) -> TileWalk:
    """Visit each row with the columns up to its own: (0,0) (1,1) (2,2)  (1,0) (2,1)  (2,0) ...

    A window ends the walk with the last diagonal of which it has a part; only the running program
    may know it.
    """
    high = length // block
    table = [(row, row - distance) for distance in range(high) for row in range(distance, high)]
    entries = jnp.asarray(np.array(table, np.int32))
    same = _same_segment(segments, block)

    def allowed(row: jax.Array, column: jax.Array) -> jax.Array:
        inside = jnp.arange(block)
        seen = causal(row * block + inside, column * block + inside, window)
        return seen if same is None else seen & same(row, column)

    tiles: jax.Array | int = len(table)
    if window is not None:
        # Two positions of tiles that lie d diagonals apart are at least (d - 1) block + 1 apart.
        least = min if isinstance(window, int) else jnp.minimum
        diagonals = least((window + block - 2) // block + 1, high)
        tiles = diagonals * high - diagonals * (diagonals - 1) // 2

    def tile(number: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, column = entries[number]
        return row, column

    return TileWalk(block, tiles, tile, allowed)


def full_walk(
    rows: int,
    columns: int,
    key_count: jax.Array | int,
    window: jax.Array | int | None,
    segments: Segments,
    block: int,
) -> TileWalk:
    """Visit all rows with the leading `key_count` columns: (0,0) (1,0) ...  (0,1) (1,1) ...

    The tiles of one column stand together, so the walk can end with any column, and with a window
    begin with any: the first row comes right after the columns that count. It visits at least one,
    so that every row has a sum, be it of masked scores.
    """
    high = rows // block
    wide: jax.Array | int = columns // block
    first: jax.Array | int = 0
    same = _same_segment(segments, block)
    all_count = isinstance(key_count, int) and key_count == columns and window is None

    def allowed(row: jax.Array, column: jax.Array) -> jax.Array | None:
        if all_count:
            return None if same is None else same(row, column)
        column_positions = column * block + jnp.arange(block)
        seen = (column_positions < key_count)[None, :]
        if window is not None:
            row_positions = key_count + row * block + jnp.arange(block)
            seen = seen & causal(row_positions, column_positions, window)
        return seen if same is None else seen & same(row, column)

    if window is not None:
        first = jnp.clip((key_count - window + 1) // block, 0, wide - 1)
    if window is not None or not isinstance(key_count, int):
        wide = jnp.maximum(1, (key_count + block - 1) // block - first)
    return TileWalk(
        block, high * wide, lambda number: (number % high, first + number // high), allowed
    )


def scanned_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, walk: TileWalk, rule: ScoreRule
) -> tuple[jax.Array, jax.Array]:
    """Compute output and log-sum-exp of all rows."""
    queries, keys, values = _cut_all(query, key, value, walk.block)

    def visit(number: jax.Array, sums: Sums) -> Sums:
        row, column = walk.tile(number)
        after = forward_tile(
            queries[row],
            keys[column],
            values[column],
            walk.allowed(row, column),
            rule,
            jax.tree.map(lambda leaf: leaf[row], sums),
        )
        return jax.tree.map(lambda leaf, new: leaf.at[row].set(new), sums, after)

    wide = jnp.promote_types(query.dtype, jnp.float32)
    column = jnp.zeros((*queries.shape[:-1], 1), wide)
    output = jnp.zeros((*queries.shape[:-1], value.shape[-1]), wide)
    nothing = Sums(column + MASKED, column, output)
    nothing = vary_over(nothing, varying_axes(query, key, value))
    output, log_sum_exp = finish(lax.fori_loop(0, walk.tiles, visit, nothing))
    return _join(output, 3), _join(log_sum_exp, 3)


def scanned_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    walk: TileWalk,
    rule: ScoreRule,
    gradient: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
) -> Gradients:
    """Compute the gradients of query, key and value; see `backward_tile` for the arguments."""
    queries, keys, values = _cut_all(query, key, value, walk.block)
    gradients, sums, deltas = (_cut(x, 3, walk.block) for x in (gradient, log_sum_exp, delta))

    def visit(number: jax.Array, before: Gradients) -> Gradients:
        row, column = walk.tile(number)
        added = backward_tile(
            queries[row],
            keys[column],
            values[column],
            walk.allowed(row, column),
            rule,
            gradients[row],
            sums[row],
            deltas[row],
        )
        d_query, d_key, d_value = before
        return (
            d_query.at[row].add(added[0]),
            d_key.at[column].add(added[1]),
            d_value.at[column].add(added[2]),
        )

    nothing = tuple(jnp.zeros(blocks.shape, sums.dtype) for blocks in (queries, keys, values))
    nothing = vary_over(nothing, varying_axes(query, key, value, gradient, log_sum_exp))
    d_query, d_key, d_value = lax.fori_loop(0, walk.tiles, visit, nothing)
    return _join(d_query, 3), _join(d_key, 2), _join(d_value, 2)


def _same_segment(
    segments: Segments, block: int
) -> Callable[[jax.Array, jax.Array], jax.Array] | None:
    if segments is None:
        return None
    rows, columns = (_cut(x, 1, block) for x in segments)
    return lambda row, column: same_segment(rows[row], columns[column])


def _cut_all(
    query: jax.Array, key: jax.Array, value: jax.Array, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _cut(query, 3, block), _cut(key, 2, block), _cut(value, 2, block)


def _cut(x: jax.Array, dim: int, block: int) -> jax.Array:
    """Cut dim `dim` of `x` into blocks: [..., S, ...] to [blocks, ..., block, ...]."""
    blocks = x.reshape(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])
    return jnp.moveaxis(blocks, dim, 0)


def _join(blocks: jax.Array, dim: int) -> jax.Array:
    """Invert `_cut`."""
    x = jnp.moveaxis(blocks, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])
