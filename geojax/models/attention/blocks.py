"""Attention in blocks: some queries of a sequence against some of its keys, and their combination.

Softmax over all keys is a weighted mean of the softmaxes over parts of them, weighted by the sums
of the exponentials. With the logarithm of this sum beside the output, a query can attend to a
sequence piece by piece, in any order and on any device. The backward pass needs no combination:
given the log-sum-exp of *all* keys, each block's gradients are simply added.

An attention sink is a learned score of each head that takes part in the softmax and has no value.
It is one more key, whose value is zero, so it is joined to the attention to all other keys as one
more block: their weights shrink by exp(log_sum_exp - total). The gradients of the other keys need
no change, once the log-sum-exp includes the sink.

Sources: M. Rabe and C. Staats, "Self-attention Does Not Need O(n^2) Memory" (arXiv:2112.05682);
for sinks, OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), section 2.2; G. Xiao
et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453).
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from geojax.models.attention.operands import ScoreRule


class ScoreBlock(NamedTuple):
    """q queries and k keys of the same B sequences, with N query and K kv heads of D dims."""

    query: jax.Array
    """Queries [B, q, N, D]."""

    key: jax.Array
    """Keys or values [B, k, K, D]."""

    value: jax.Array
    """Keys or values [B, k, K, D]."""

    query_segments: jax.Array | None
    """Segments of the queries, int32 [B, q], or None where each sequence is one document."""

    key_segments: jax.Array | None
    """Segments of the keys, int32 [B, k], or None."""

    causal: bool
    """True: the keys have the queries' own positions, in ascending order. False: they are one piece
    of the sequence, and all of it lies before all queries."""

    key_count: jax.Array | None = None
    """Number of leading keys that count, int32 [], maybe 0 (not where causal). None: all. With a
    window the first query comes right after the last key that counts."""

    is_windowed: jax.Array | None = None
    """True where the window of the rule applies, bool []. None: it does if there is one."""

    def visible_keys(self, rule: ScoreRule) -> jax.Array | int | None:
        """Return the keys that a query sees, counted from its own back; None: all."""
        if rule.window is None or self.is_windowed is None:
            return rule.window
        whole = self.query.shape[1] + self.key.shape[1]
        return jnp.where(self.is_windowed, rule.window, whole)


class Partial(NamedTuple):
    """Attention to some of the keys that a query sees, in at least float32.

    A query that sees none of them has a log_sum_exp so low that `join` gives it no weight, and any
    finite output.
    """

    output: jax.Array
    """Queries [B, q, N, D]."""

    log_sum_exp: jax.Array
    """Logarithm of the sum of exp(score), [B, q, N, 1]."""


class BlockGradients(NamedTuple):
    """Contribution of a block to the gradients, in at least float32."""

    query: jax.Array
    """Queries [B, q, N, D]."""

    key: jax.Array
    """Keys or values [B, k, K, D]."""

    value: jax.Array
    """Keys or values [B, k, K, D]."""


class Kernel(Protocol):
    """Implementation of the attention of one block."""

    def forward(self, block: ScoreBlock, rule: ScoreRule) -> Partial:
        """Attend with the block's queries to its keys."""

    def backward(
        self,
        block: ScoreBlock,
        rule: ScoreRule,
        output: jax.Array,
        log_sum_exp: jax.Array,
        gradient: jax.Array,
    ) -> BlockGradients:
        """Compute the block's contribution to the gradients.

        Args:
            block: as in the forward pass.
            rule: as in the forward pass.
            output: [B, q, N, D], over all keys of the queries, those of other blocks too.
            log_sum_exp: [B, q, N, 1], likewise.
            gradient: [B, q, N, D], of that output.
        """


def join(one: Partial, other: Partial) -> Partial:
    """Combine the attention to two sets of keys."""
    total = jnp.logaddexp(one.log_sum_exp, other.log_sum_exp)
    weights = jnp.exp(one.log_sum_exp - total), jnp.exp(other.log_sum_exp - total)
    return Partial(weights[0] * one.output + weights[1] * other.output, total)


def row_delta(gradient: jax.Array, output: jax.Array) -> jax.Array:
    """Sum gradient * output over D, [..., 1]: the softmax's own term in its gradient."""
    wide = jnp.promote_types(output.dtype, jnp.float32)
    return jnp.sum(gradient.astype(wide) * output.astype(wide), axis=-1, keepdims=True)


def join_sinks(part: Partial, sinks: jax.Array | None) -> Partial:
    """Add the sinks [N] (None: there are none) to the attention to all keys."""
    if sinks is None:
        return part
    total = jnp.logaddexp(part.log_sum_exp, sinks[:, None].astype(part.log_sum_exp.dtype))
    return Partial(part.output * jnp.exp(part.log_sum_exp - total), total)


def sinks_gradient(
    sinks: jax.Array | None, output: jax.Array, log_sum_exp: jax.Array, gradient: jax.Array
) -> jax.Array | None:
    """Compute the gradient of the sinks [N]; None where there are none.

    Args:
        sinks: as in `join_sinks`.
        output: [B, S, N, D], over all keys and the sink.
        log_sum_exp: [B, S, N, 1], likewise.
        gradient: [B, S, N, D], of that output.
    """
    if sinks is None:
        return None
    weights = jnp.exp(sinks[:, None].astype(log_sum_exp.dtype) - log_sum_exp)
    return -jnp.sum(weights * row_delta(gradient, output), axis=(0, 1, 3)).astype(sinks.dtype)
