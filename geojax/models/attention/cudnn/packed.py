"""cuDNN's flash attention for packed documents: no mask, no bias, only their offsets.

cuDNN takes packed documents as many short sequences, of a number that is compiled in. It lays their
log-sum-exps one after the other, each with room for a whole sequence; here they are moved to their
positions, and back. In the backward pass it makes room for whole sequences of gradients too, so
that heads and rows are computed in groups.
"""

import math

import jax
import jax.numpy as jnp

from geojax.models.attention.cudnn.primitives import (
    PADDING_CAUSAL,
    Sequences,
    backward_workspace_bytes,
    flash_backward,
    flash_forward,
)
from geojax.models.attention.operands import ScoreRule

CAPACITIES = (8, 32)
"""Numbers of segments of one sequence that cuDNN is compiled for, of which the least that holds a
batch's is run: time and memory grow with it. A batch in which some sequence has more is computed by
the tiled kernel."""

MOST_WORKSPACE_BYTES = 5 * 2**28
"""Workspace of one backward call above which heads and rows are divided into groups. Gradients of
1 GiB and their sums fit."""

# JAX 0.10 takes the query's heads for the key's when it turns positions into offsets.
_NEEDS_ALL_HEADS = jax.__version_info__ < (0, 11)


def most_segments(segment_ids: jax.Array) -> jax.Array:
    """Return the largest number of segments in a sequence of `segment_ids` [B, S], int32 []."""
    return jnp.max(jnp.sum(_begins(segment_ids), axis=1, dtype=jnp.int32))


def workspace_bytes(query_shape: tuple[int, ...], value_shape: tuple[int, ...]) -> int:
    """Return the most bytes that a backward needs beside operands and results.

    Query [B, S, N, D], value [B, S, K, W], of whatever number of segments.
    """
    found = []
    for capacity in (1, *CAPACITIES):
        needed = backward_workspace_bytes(query_shape, value_shape, capacity)
        groups = (1, 1) if capacity == 1 else _groups(needed, query_shape[0], value_shape[2])
        found.append(needed // math.prod(groups))
    return max(found)


def packed_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    rule: ScoreRule,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention inside each run of equal `segment_ids` [B, S].

    Query [B, S, N, D]; key, value [B, S, K, D]; at most `capacity` runs in each sequence. Returns
    the output and the log-sum-exp, [B, S, N].
    """
    key, value = (_repeated(x, query) for x in (key, value))
    sequences = _sequences(segment_ids, capacity)
    output, statistics = flash_forward(query, key, value, sequences, PADDING_CAUSAL, rule)
    sequence, offset = _runs_and_offsets(segment_ids)
    return output, statistics[sequence, :, offset]


def packed_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    rule: ScoreRule,
    output: jax.Array,
    log_sum_exp: jax.Array,
    gradient: jax.Array,
    capacity: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of query, key and value, for arguments as in `packed_forward`.

    The output and the log-sum-exp may be those over more keys than these.
    """
    needed = backward_workspace_bytes(query.shape, value.shape, capacity)
    row_groups, head_groups = _groups(needed, query.shape[0], key.shape[2])

    def cut(x: jax.Array) -> list[jax.Array]:
        """Cut an operand with heads into groups of heads, and those into groups of rows."""
        of_heads = jnp.split(x, head_groups, axis=2)
        return [part for each in of_heads for part in jnp.split(each, row_groups)]

    segments = jnp.split(segment_ids, row_groups) * head_groups
    operands = map(cut, (query, key, value, output, log_sum_exp, gradient))
    parts = [_backward(rule, capacity, *group) for group in zip(segments, *operands, strict=True)]

    def whole(parts: tuple[jax.Array, ...]) -> jax.Array:
        of_heads = [parts[n : n + row_groups] for n in range(0, len(parts), row_groups)]
        return jnp.concatenate([jnp.concatenate(each) for each in of_heads], axis=2)

    d_query, d_key, d_value = map(whole, zip(*parts, strict=True))
    return d_query, d_key, d_value


def _groups(needed_bytes: int, rows: int, key_heads: int) -> tuple[int, int]:
    """Return the fewest groups of rows, and of heads, whose workspaces are small enough.

    Rows come first, since a group of them lies in one piece; of heads there are at most as many
    groups as key heads.
    """
    groups = needed_bytes / MOST_WORKSPACE_BYTES
    of_rows = _divisor(rows, groups)
    return of_rows, _divisor(key_heads, groups / of_rows)


def _divisor(number: int, least: float) -> int:
    """Return the smallest divisor of `number` that is at least `least`; without one `number`."""
    return next((n for n in range(1, number) if number % n == 0 and n >= least), number)


def _backward(
    rule: ScoreRule,
    capacity: int,
    segment_ids: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    log_sum_exp: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, length, heads = log_sum_exp.shape
    sequence, offset = _runs_and_offsets(segment_ids)
    statistics = jnp.zeros((rows * capacity, heads, length), log_sum_exp.dtype)
    statistics = statistics.at[sequence, :, offset].set(log_sum_exp, unique_indices=True)
    d_query, d_key, d_value = flash_backward(
        query,
        _repeated(key, query),
        _repeated(value, query),
        _sequences(segment_ids, capacity),
        PADDING_CAUSAL,
        rule,
        output,
        statistics,
        gradient,
    )
    return d_query, _sum_repeated(d_key, key), _sum_repeated(d_value, value)


def segment_layout(segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Find the starts and lengths of the runs of equal numbers in each sequence.

    Args:
        segment_ids: int32 [B, S].
        most: most runs of a sequence.

    Returns:
        starts int32 [B, most + 1] and lengths int32 [B, most], -1 where there are no more runs (the
        last start is always -1).
    """
    length = segment_ids.shape[1]

    def of_row(begins: jax.Array) -> tuple[jax.Array, jax.Array]:
        (starts,) = jnp.nonzero(begins, size=most + 1, fill_value=length)
        lengths = jnp.diff(starts)
        starts = jnp.where(lengths > 0, starts[:-1], -1)
        return jnp.append(starts, -1), jnp.where(lengths > 0, lengths, -1)

    starts, lengths = jax.vmap(of_row)(_begins(segment_ids))
    return starts.astype(jnp.int32), lengths.astype(jnp.int32)


def _sequences(segment_ids: jax.Array, capacity: int) -> Sequences:
    starts, lengths = segment_layout(segment_ids, capacity)
    return Sequences(lengths, lengths, starts, starts)


def _runs_and_offsets(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each position's run, among all sequences', and its offset in it, int32 [B, S]."""
    begins = _begins(segment_ids)
    sequence = jnp.cumsum(begins.ravel()).reshape(begins.shape) - 1
    position = jnp.arange(segment_ids.shape[1])
    start = jax.lax.cummax(jnp.where(begins, position, 0), axis=1)
    return sequence, position - start


def _begins(segment_ids: jax.Array) -> jax.Array:
    first = jnp.ones_like(segment_ids[:, :1], bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def _repeated(x: jax.Array, query: jax.Array) -> jax.Array:
    """Repeat the heads of key or value to those of the query, where JAX needs that."""
    return jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) if _NEEDS_ALL_HEADS else x


def _sum_repeated(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """Transpose `_repeated`; sums are in at least float32."""
    if gradient.shape == x.shape:
        return gradient
    rows, length, heads, size = x.shape
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    return jnp.sum(gradient.reshape(rows, length, heads, -1, size), axis=3, dtype=wide)
