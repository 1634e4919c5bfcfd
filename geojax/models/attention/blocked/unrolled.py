"""Blocked causal attention of short sequences: every block of query rows is a tile of its own.

rows 0..63      columns 0..63          Each tile is as wide as its rows can see, so its
rows 64..127    columns 0..127         softmax is exact at once, nothing right of the
rows 128..191   columns 0..191         diagonal's block is computed, and every size is
...                                    known to the compiler.

Shapes as in `tiles`, with r = c = S.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from geojax.models.attention.blocked.tiles import (
    backward_tile,
    causal,
    finish,
    forward_tile,
    same_segment,
)


def unrolled_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    block: int,
) -> tuple[jax.Array, jax.Array]:
    """Compute output and log-sum-exp of all rows, `block` of them at a time."""
    parts = []
    for start, end in _blocks(query.shape[3], block):
        allowed = _allowed(segment_ids, start, end)
        tile = query[:, :, :, start:end], key[:, :, :end], value[:, :, :end]
        parts.append(finish(forward_tile(*tile, allowed, scale, None)))
    output, log_sum_exp = (jnp.concatenate(part, axis=3) for part in zip(*parts, strict=True))
    return output, log_sum_exp


def unrolled_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    block: int,
    gradient: jax.Array,
    log_sum_exp: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of query, key and value; see `backward_tile` for the arguments."""
    d_query: list[jax.Array] = []
    d_key: jax.Array | None = None
    d_value: jax.Array | None = None
    # The last block sees every column, so the others add to what it makes.
    for start, end in reversed(list(_blocks(query.shape[3], block))):
        rows = (slice(None), slice(None), slice(None), slice(start, end))
        columns = (slice(None), slice(None), slice(0, end))
        d_rows, d_columns_key, d_columns_value = backward_tile(
            query[rows],
            key[columns],
            value[columns],
            _allowed(segment_ids, start, end),
            scale,
            gradient[rows],
            log_sum_exp[rows],
            delta[rows],
        )
        d_query.insert(0, d_rows)
        d_key = d_columns_key if d_key is None else d_key.at[columns].add(d_columns_key)
        d_value = d_columns_value if d_value is None else d_value.at[columns].add(d_columns_value)
    assert d_key is not None, "a sequence has at least one block"
    assert d_value is not None, "a sequence has at least one block"
    return jnp.concatenate(d_query, axis=3), d_key, d_value


def _blocks(length: int, block: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, block):
        yield start, min(start + block, length)


def _allowed(segment_ids: jax.Array | None, start: int, end: int) -> jax.Array:
    allowed = causal(jnp.arange(start, end), jnp.arange(end))
    if segment_ids is None:
        return allowed
    return allowed & same_segment(segment_ids[:, start:end], segment_ids[:, :end])
