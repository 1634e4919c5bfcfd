"""Attention in blocks: some queries of a row against some of its keys, and how results are joined.

Softmax over all keys is a weighted mean of the softmaxes over parts of them, with the sums of the
exponentials as weights; so whoever keeps the logarithm of that sum beside the output can attend to
a row piece by piece, in any order and on any device. Backwards no joining is needed: given the
log-sum-exp of *all* keys, each block's gradients are simply added.

Source: M. Rabe and C. Staats, "Self-attention Does Not Need O(n^2) Memory" (arXiv:2112.05682).
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Block(NamedTuple):
    """q queries and k keys of the same B rows, with H query heads and K key heads of D dims."""

    query: jax.Array
    """[B, q, H, D]"""

    key: jax.Array
    """[B, k, K, D]"""

    value: jax.Array
    """[B, k, K, D]"""

    query_segments: jax.Array | None
    """int32 [B, q], or None where each row is one document."""

    key_segments: jax.Array | None
    """int32 [B, k], or None."""

    causal: bool
    """True: the keys are those of the queries' own positions, in ascending order. False: they are
    one piece of the row, and all of it lies before all queries."""

    key_count: jax.Array | None = None
    """int32 []: only so many of the leading keys count, maybe none (not where causal). None: all
    of them."""


class Partial(NamedTuple):
    """Attention to some of the keys that a query sees, in at least float32.

    A query that sees none of them has a log_sum_exp so low that `join` gives it no weight, and any
    finite output.
    """

    output: jax.Array
    """[B, q, H, D]"""

    log_sum_exp: jax.Array
    """[B, q, H, 1], the logarithm of the sum of exp(score)."""


class Gradients(NamedTuple):
    """What a block adds to the gradients, in at least float32."""

    query: jax.Array
    """[B, q, H, D]"""

    key: jax.Array
    """[B, k, K, D]"""

    value: jax.Array
    """[B, k, K, D]"""


class Kernel(Protocol):
    """One way to compute a block."""

    def forward(self, block: Block, scale: float) -> Partial:
        """The block's queries attend to its keys."""

    def backward(
        self,
        block: Block,
        scale: float,
        output: jax.Array,
        log_sum_exp: jax.Array,
        gradient: jax.Array,
    ) -> Gradients:
        """The block's part of the gradients.

        Args:
            block: as in the forward pass.
            scale: as in the forward pass.
            output: [B, q, H, D] of the queries over all their keys, those of other blocks too.
            log_sum_exp: [B, q, H, 1], likewise.
            gradient: [B, q, H, D], of that output.
        """


def join(one: Partial, other: Partial) -> Partial:
    """Attention to the keys of both."""
    total = jnp.logaddexp(one.log_sum_exp, other.log_sum_exp)
    weights = jnp.exp(one.log_sum_exp - total), jnp.exp(other.log_sum_exp - total)
    return Partial(weights[0] * one.output + weights[1] * other.output, total)
