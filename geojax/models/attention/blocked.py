"""Blocked attention in plain JAX, for any backend and dtype: memory linear in the sequence.

The score matrix is computed tile by tile and never kept; the backward pass computes it again from
the log-sum-exp of its rows. Tiles above the diagonal, or wholly outside of a window, are not
visited. A tile is some query rows against some key columns.

A short causal sequence is unrolled: every block of query rows is a tile of its own.

    rows 0..63      columns 0..63          Each tile is as wide as its rows can see, so its
    rows 64..127    columns 0..127         softmax is exact at once, nothing right of the
    rows 128..191   columns 0..191         diagonal's block is computed, and every size is
    ...                                    known to the compiler.

A window's columns begin later, if its size is static; one that only some layers have is masked.

A long sequence is scanned: one loop over square tiles, with the online softmax. The tiles that
count are listed in a table that the loop walks, so the program's size does not grow with the
sequence. The sums of all rows are the loop's carry, of which each tile updates one block in place.

Source: T. Dao, "FlashAttention-2" (arXiv:2307.08691), algorithms 1 and 2; the online softmax is
M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

Shapes: B batch, K kv heads, G query heads of each, r query positions, c key positions, D head dim.

    query, gradient [B, K, G, r, D]    key, value [B, K, c, D]    scores [B, K, G, r, c]
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives.axes import vary_over, varying_axes
from geojax.models.attention.blocks import BlockGradients, Partial, ScoreBlock, row_delta
from geojax.models.attention.operands import ScoreRule

# Finite, so that a row which a whole tile masks gives exp(0) and not exp(inf - inf); the next tile
# in which the row sees something weighs that garbage with exp(MASKED - maximum) = 0.
MASKED = -1e30


class Sums(NamedTuple):
    """Running sums of the online softmax for each query row, in at least float32."""

    maximum: jax.Array
    """Largest score, [B, K, G, r, 1]."""

    total: jax.Array
    """Sum of exp(score - maximum), [B, K, G, r, 1]."""

    output: jax.Array
    """Sum of exp(score - maximum) * value, [B, K, G, r, D]."""


def forward_tile(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    allowed: jax.Array | None,
    rule: ScoreRule,
    before: Sums | None,
) -> Sums:
    """Add this tile to the sums `before` (None: this is the first tile)."""
    scores = _masked(_scores(query, key, rule), allowed)
    maximum = scores.max(axis=-1, keepdims=True)
    if before is not None:
        maximum = jnp.maximum(maximum, before.maximum)
    weights = jnp.exp(scores - maximum)
    total = weights.sum(axis=-1, keepdims=True)
    output = _product("bkgrc,bkcd->bkgrd", weights, value)
    if before is not None:
        fade = jnp.exp(before.maximum - maximum)
        total = total + fade * before.total
        output = output + fade * before.output
    return Sums(maximum, total, output)


def finish(sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Return the softmax-weighted values, and the log of each row's sum of exp(score)."""
    return sums.output / sums.total, sums.maximum + jnp.log(sums.total)


def backward_tile(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    allowed: jax.Array | None,
    rule: ScoreRule,
    gradient: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute this tile's part of the gradients of query, key and value, in at least float32.

    The probabilities are computed again from the scores: exp(score - log_sum_exp). `delta` is the
    result of `row_delta`; like `log_sum_exp` it is [B, K, G, r, 1].
    """
    scores = _scores(query, key, rule)
    weights = jnp.exp(_masked(scores, allowed) - log_sum_exp)
    d_value = _product("bkgrc,bkgrd->bkcd", weights, gradient)
    d_weights = _product("bkgrd,bkcd->bkgrc", gradient, value)
    d_scores = rule.scale * (weights * (d_weights - delta))
    if rule.softcap is not None:
        d_scores = d_scores * (1 - jnp.square(scores / rule.softcap))
    d_query = _product("bkgrc,bkcd->bkgrd", d_scores, key)
    d_key = _product("bkgrc,bkgrd->bkcd", d_scores, query)
    return d_query, d_key, d_value


def causal(row: jax.Array, column: jax.Array, window: jax.Array | int | None = None) -> jax.Array:
    """Mask keys at `column` [c] that the query at `row` [r] does not see; returns bool [r, c].

    It sees its own and those before it, of these the last `window` (None: all).
    """
    seen = row[:, None] >= column[None, :]
    return seen if window is None else seen & (row[:, None] - column[None, :] < window)


def same_segment(row_segments: jax.Array, column_segments: jax.Array) -> jax.Array:
    """Mask keys of other segments than the query's; [B, r] and [B, c] to bool [B, 1, 1, r, c]."""
    return (row_segments[:, :, None] == column_segments[:, None, :])[:, None, None]


def _scores(query: jax.Array, key: jax.Array, rule: ScoreRule) -> jax.Array:
    scores = rule.scale * _product("bkgrd,bkcd->bkgrc", query, key)
    return scores if rule.softcap is None else rule.softcap * jnp.tanh(scores / rule.softcap)


def _masked(scores: jax.Array, allowed: jax.Array | None) -> jax.Array:
    return scores if allowed is None else jnp.where(allowed, scores, MASKED)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Multiply in the dtype of `right`, summed in at least float32."""
    wide = jnp.promote_types(right.dtype, jnp.float32)
    return jnp.einsum(equation, left.astype(right.dtype), right, preferred_element_type=wide)


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


LONGEST_UNROLLED = 1024
"""Causal blocks up to here are unrolled, longer ones scanned."""

UNROLLED_BLOCK = 64
"""Query rows of an unrolled tile. Smaller computes less right of the diagonal, larger has larger
matmuls; measured on the CPU with heads of 64 dims."""

SCANNED_BLOCK = 256
"""Most rows and columns of a scanned tile."""


class TiledKernel:
    """Tiled `Kernel` (see `geojax.models.attention.blocks`).

    Scores, softmax and sums are in at least float32 (float64 for float64 inputs); probabilities are
    rounded to the inputs' dtype before they are multiplied with the values, as FlashAttention does.
    """

    def forward(self, block: ScoreBlock, rule: ScoreRule) -> Partial:
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
        block: ScoreBlock,
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


def _unrolled(block: ScoreBlock) -> bool:
    return block.causal and block.query.shape[1] <= LONGEST_UNROLLED


def _walk(block: ScoreBlock, rule: ScoreRule) -> TileWalk:
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


def _operands(block: ScoreBlock) -> tuple[jax.Array, jax.Array, jax.Array]:
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
