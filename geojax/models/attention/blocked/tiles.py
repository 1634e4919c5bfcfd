"""One tile of blocked attention, forward and backward: some query rows against some key columns.

Source: T. Dao, "FlashAttention-2" (arXiv:2307.08691), algorithms 1 and 2; the online softmax is
M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).

Shapes: B batch, K kv heads, G query heads of each, r query positions, c key positions, D head dim.

    query, gradient [B, K, G, r, D]    key, value [B, K, c, D]    scores [B, K, G, r, c]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

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


def row_delta(gradient: jax.Array, output: jax.Array) -> jax.Array:
    """Sum gradient * output over D, [..., 1]: the softmax's own term in its gradient."""
    wide = jnp.promote_types(output.dtype, jnp.float32)
    return jnp.sum(gradient.astype(wide) * output.astype(wide), axis=-1, keepdims=True)


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
