"""What attention sends over `context`, by formula: to choose a method, and to test the programs.

With C ranks, and in each of them B rows of S = T / C columns, H query heads and K key heads of D
dims in numbers of b bytes, w bytes (at least 4) where gradients are summed, and ids = 4 B S bytes
of segment ids if rows hold several documents:

    kv = 2 B S K D b      keys and values of a rank        qo = 2 B S H D b    queries and outputs

                forward                                backward
    ring        (C - 1) (kv + ids)                     (C - 1) (kv + ids + kv w / b)
    all_gather  (C - 1) (kv + ids)                     (C - 1) kv w / b
    ulysses     (C - 1) / C (qo + r kv) + (C - 1) ids  (C - 1) / C (qo + r kv)

where r = lcm(K, C) / K is 1 as long as the key heads can be dealt out to the ranks. Since S is
T / C, what ring and all_gather send hardly depends on C and falls with the key heads, and what
ulysses sends falls with C. Where the forward pass is run again for the backward pass
(rematerialisation) its bytes count twice.
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
    """What one device sends over `context` in one call of `attention`."""

    forward: Fraction
    """In the forward pass."""

    backward: Fraction
    """In the backward pass."""


def expected_context_bytes(
    parallelism: Parallelism,
    *,
    rows: int,
    sequence: int,
    heads: int,
    key_heads: int,
    head_size: int,
    dtype: Any,
    packed: bool,
) -> ContextBytes:
    """The formulas of this module.

    Args:
        parallelism: how rows are spread.
        rows: of a device.
        sequence: columns of a whole row.
        heads: query heads of a device.
        key_heads: key heads of a device.
        head_size: dims of a head.
        dtype: of query, key and value.
        packed: whether there are segment ids.
    """
    ranks = parallelism.context
    numbers = jnp.dtype(dtype).itemsize
    sums = jnp.promote_types(dtype, jnp.float32).itemsize
    columns = rows * sequence // ranks
    ids = 4 * columns if packed else 0
    keys = 2 * columns * key_heads * head_size
    if parallelism.context_method == "ring":
        hops = ranks - 1
        forward = hops * permute_bytes(keys * numbers + ids, ranks)
        return ContextBytes(forward, forward + hops * permute_bytes(keys * sums, ranks))
    if parallelism.context_method == "all_gather":
        return ContextBytes(
            all_gather_bytes(keys * numbers + ids, ranks),
            reduce_scatter_bytes(ranks * keys * sums, ranks),
        )
    sent_keys = 2 * columns * sent_key_heads(key_heads, ranks) * head_size
    queries = 2 * columns * heads * head_size
    exchanged = all_to_all_bytes((queries + sent_keys) * numbers, ranks)
    return ContextBytes(exchanged + all_gather_bytes(ids, ranks), exchanged)
