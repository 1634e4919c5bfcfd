"""cuDNN's flash attention for packed documents: no mask, no bias, only their offsets.

cuDNN takes packed documents as many short sequences, of a number that is compiled in. It lays their
log-sum-exps one after the other, each with room for a whole sequence; here they are moved to their
positions, and back. In the backward pass it makes room for whole sequences of gradients too, so
that heads and rows are computed in groups.
"""

import functools
import math
from typing import NamedTuple

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


class Segments(NamedTuple):
    """Runs of equal numbers in the sequences of a batch, computed once for all kernels."""

    most: jax.Array
    """The largest number of runs in a sequence, int32 []."""
    starts: jax.Array
    """Their first positions, int32 [B, M], -1 where there are no more; M is the largest capacity.
    """
    lengths: jax.Array
    """Their lengths, likewise."""
    number: jax.Array
    """The number of each position's run among those of all sequences, int32 [B, S]."""
    offset: jax.Array
    """Each position's offset in its run, int32 [B, S]."""

    @classmethod
    def of(cls, segment_ids: jax.Array) -> "Segments":
        """Find the runs of `segment_ids` [B, S]."""
        begins = _begins(segment_ids)
        position = jnp.arange(segment_ids.shape[1])
        start = jax.lax.cummax(jnp.where(begins, position, 0), axis=1)
        starts, lengths = segment_layout(segment_ids, CAPACITIES[-1])
        return cls(
            jnp.max(jnp.sum(begins, axis=1, dtype=jnp.int32)),
            starts,
            lengths,
            jnp.cumsum(begins.ravel()).reshape(begins.shape) - 1,
            position - start,
        )

    def rows(self, groups: int) -> list["Segments"]:
        """Divide the sequences into groups, which number their runs anew."""
        parts = zip(*(jnp.split(x, groups) for x in self[1:]), strict=True)
        return [
            Segments(self.most, starts, lengths, number - number[0, 0], offset)
            for starts, lengths, number, offset in parts
        ]

    def sequences(self, capacity: int) -> Sequences:
        """Return the runs as cuDNN takes them, where no sequence has more than `capacity`."""
        ends = jnp.pad(self.starts[:, :capacity], ((0, 0), (0, 1)), constant_values=-1)
        lengths = self.lengths[:, :capacity]
        return Sequences(lengths, lengths, ends, ends)


def workspace_bytes(query_shape: tuple[int, ...], value_shape: tuple[int, ...]) -> int:
    """Return the most bytes that a backward needs beside operands and results.

    Query [B, S, N, D], value [B, S, K, W], of whatever number of segments.
    """
    found = []
    for capacity in (1, *CAPACITIES):
        needed = backward_workspace_bytes(query_shape, value_shape, capacity)
        groups = (1, 1) if capacity == 1 else _groups(needed, query_shape, value_shape[2])
        found.append(needed // math.prod(groups))
    return max(found)


def packed_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
    rule: ScoreRule,
    capacity: int,
) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention inside each of at most `capacity` runs of a sequence.

    Query [B, S, N, D]; key, value [B, S, K, D]. Returns the output and the log-sum-exp, [B, S, N].
    """
    key, value = (_repeated(x, query) for x in (key, value))
    sequences = segments.sequences(capacity)
    output, statistics = flash_forward(query, key, value, sequences, PADDING_CAUSAL, rule)
    return output, statistics[segments.number, :, segments.offset]


def packed_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
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
    key_heads = key.shape[2]
    row_groups, head_groups = _groups(needed, query.shape, key_heads)
    shared = max(head_groups // key_heads, 1)  # groups of query heads that read one key head

    def cut(x: jax.Array) -> list[jax.Array]:
        """Cut an operand with heads into groups of heads, and those into groups of rows."""
        few = x.shape[2] == key_heads
        of_heads = jnp.split(x, head_groups // shared if few else head_groups, axis=2)
        of_heads = [part for part in of_heads for _ in range(shared if few else 1)]
        return [part for each in of_heads for part in jnp.split(each, row_groups)]

    of_rows = segments.rows(row_groups) * head_groups
    operands = map(cut, (query, key, value, output, log_sum_exp, gradient))
    parts = [_backward(rule, capacity, *group) for group in zip(of_rows, *operands, strict=True)]

    def whole(parts: tuple[jax.Array, ...], shared: int) -> jax.Array:
        of_heads = [
            jnp.concatenate(parts[n : n + row_groups]) for n in range(0, len(parts), row_groups)
        ]
        sums = [_sum(of_heads[n : n + shared]) for n in range(0, len(of_heads), shared)]
        return jnp.concatenate(sums, axis=2)

    d_query, d_key, d_value = zip(*parts, strict=True)
    return whole(d_query, 1), whole(d_key, shared), whole(d_value, shared)


def _sum(parts: list[jax.Array]) -> jax.Array:
    """Sum the gradients of a key head that several groups read, in at least float32."""
    wide = jnp.promote_types(parts[0].dtype, jnp.float32)
    return functools.reduce(jnp.add, [part.astype(wide) for part in parts])


def _groups(needed_bytes: int, query_shape: tuple[int, ...], key_heads: int) -> tuple[int, int]:
    """Return the fewest groups of rows, and of heads, whose workspaces are small enough.

    Rows come first, since a group of them lies in one piece. A group of heads has whole key heads,
    or reads one that others read too.
    """
    groups = needed_bytes / MOST_WORKSPACE_BYTES
    rows, _, heads, _ = query_shape
    of_rows = next(n for n in _divisors(rows) if n >= min(groups, rows))
    fitting = [n for n in _divisors(heads) if key_heads % n == 0 or n % key_heads == 0]
    return of_rows, next(n for n in fitting if n >= min(groups / of_rows, heads))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _backward(
    rule: ScoreRule,
    capacity: int,
    segments: Segments,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    log_sum_exp: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows, length, heads = log_sum_exp.shape
    statistics = jnp.zeros((rows * capacity, heads, length), log_sum_exp.dtype)
    places = segments.number, slice(None), segments.offset
    statistics = statistics.at[places].set(log_sum_exp, unique_indices=True)
    d_query, d_key, d_value = flash_backward(
        query,
        _repeated(key, query),
        _repeated(value, query),
        segments.sequences(capacity),
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
        starts and lengths, int32 [B, most], -1 where there are no more runs.
    """
    length = segment_ids.shape[1]

    def of_row(begins: jax.Array) -> tuple[jax.Array, jax.Array]:
        (starts,) = jnp.nonzero(begins, size=most + 1, fill_value=length)
        lengths = jnp.diff(starts)
        return jnp.where(lengths > 0, starts[:-1], -1), jnp.where(lengths > 0, lengths, -1)

    starts, lengths = jax.vmap(of_row)(_begins(segment_ids))
    return starts.astype(jnp.int32), lengths.astype(jnp.int32)


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
