"""Predicted bytes of attention over `context`.

With C ranks, and in each of them B sequences of S = T / C positions, N query heads and K kv heads
of D dims (and values of W dims) in numbers of b bytes, w bytes (at least 4) where gradients are
summed, and ids = 4 B S bytes of segment ids if sequences hold several documents:

    kv = B S K (D + W) b    keys and values of a rank    qo = B S N (D + W) b    queries, outputs

                forward                                backward
    ring        (C - 1) (kv + ids)                     (C - 1) (kv + ids + kv w / b)
    all_gather  (C - 1) (kv + ids)                     (C - 1) kv w / b
    ulysses     (C - 1) / C (qo + r kv) + (C - 1) ids  (C - 1) / C (qo + r kv)

where r = lcm(K, C) / K is 1 as long as the kv heads can be dealt out to the ranks. Since S is
T / C, what ring and all_gather send hardly depends on C and falls with the kv heads, and what
ulysses sends falls with C. Where the forward pass is run again for the backward pass
(rematerialization) its bytes count twice.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from geojax.hlo.conventions import (
    all_gather_bytes,
    all_to_all_bytes,
    permute_bytes,
    reduce_scatter_bytes,
)
from geojax.models.attention.context.ulysses import sent_key_heads
from geojax.models.parallel.parallelism import Parallelism


@dataclass(frozen=True)
class ContextBytes:
    """The bytes that one device sends over `context` in one call of `attention`."""

    forward: Fraction
    """The bytes of the forward pass."""

    backward: Fraction
    """The bytes of the backward pass."""


def predicted_context_bytes(
    parallelism: Parallelism,
    *,
    sequences: int,
    sequence_length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: Any,
    packed: bool,
) -> ContextBytes:
    """Predict the bytes of one call of `attention` by the formulas of this module.

    Args:
        parallelism: the axes that share a sequence.
        sequences: number of sequences on a device.
        sequence_length: positions of a whole sequence.
        heads: query heads of a device.
        kv_heads: kv heads of a device.
        head_dim: dims of a head's query or key.
        value_dim: dims of its value.
        dtype: dtype of query, key and value.
        packed: True if there are segment ids.
    """
    ranks = parallelism.context
    numbers = jnp.dtype(dtype).itemsize
    sums = jnp.promote_types(dtype, jnp.float32).itemsize
    positions = sequences * sequence_length // ranks
    ids = 4 * positions if packed else 0
    widths = head_dim + value_dim
    keys = positions * kv_heads * widths
    if parallelism.context_method == "ring":
        hops = ranks - 1
        forward = hops * permute_bytes(keys * numbers + ids, ranks)
        return ContextBytes(forward, forward + hops * permute_bytes(keys * sums, ranks))
    if parallelism.context_method == "all_gather":
        return ContextBytes(
            all_gather_bytes(keys * numbers + ids, ranks),
            reduce_scatter_bytes(ranks * keys * sums, ranks),
        )
    sent_keys = positions * sent_key_heads(kv_heads, ranks) * widths
    queries = positions * heads * widths
    exchanged = all_to_all_bytes((queries + sent_keys) * numbers, ranks)
    return ContextBytes(exchanged + all_gather_bytes(ids, ranks), exchanged)
