"""Attention over `context` by trading a share of the sequence for a share of the heads.

Before attention every rank has all heads of its positions; an all-to-all gives it all positions of
its heads, any implementation does the rest on whole sequences, and another all-to-all returns the
outputs. Positions keep their natural order: with whole sequences there is nothing to balance.

The query heads must be a multiple of the ranks. Key heads need not: they are repeated up to the
least common multiple with the ranks, and then a rank gets those that its query heads read. Where
there are fewer key heads than ranks, and they divide, that is one head for each rank, as little as
can be; where neither divides the other, ranks get some heads more than once.

Source: S. Jacobs et al., "DeepSpeed Ulysses" (arXiv:2309.14509).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.attention.operands import Operands, ScoreRule

Attention = Callable[[Operands, ScoreRule], jax.Array]


def ulysses_attention(
    operands: Operands, rule: ScoreRule, ranks: int, attend: Attention
) -> jax.Array:
    """Compute causal attention of this rank's positions; `attend` sees whole sequences.

    Shapes as in `attention`; all arrays vary over the same axes, `context` of `ranks` ranks among
    them.
    """
    query, key, value, segment_ids, sinks, is_windowed = operands
    key_heads = sent_key_heads(key.shape[2], ranks)
    key, value = (_repeat_heads(x, key_heads // x.shape[2]) for x in (key, value))
    query, key, value = (_exchange(x, given_dim=2, taken_dim=1) for x in (query, key, value))
    if segment_ids is not None:
        segment_ids = lax.all_gather(segment_ids, "context", axis=1, tiled=True)
    if sinks is not None:  # those of this rank's heads
        own = sinks.shape[0] // ranks
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index("context") * own, own)
    output = attend(Operands(query, key, value, segment_ids, sinks, is_windowed), rule)
    return _exchange(output, given_dim=1, taken_dim=2)


def sent_key_heads(key_heads: int, ranks: int) -> int:
    """Return the number of exchanged key heads: the least that can be dealt out evenly."""
    return math.lcm(key_heads, ranks)


def _exchange(x: jax.Array, given_dim: int, taken_dim: int) -> jax.Array:
    """Exchange shares: all of `taken_dim` for a share of `given_dim`."""
    return lax.all_to_all(x, "context", given_dim, taken_dim, tiled=True)


def _repeat_heads(x: jax.Array, repeats: int) -> jax.Array:
    """Repeat heads: [B, S, K, D] to [B, S, K repeats, D]; gradients sum in at least float32."""
    if repeats == 1:
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.repeat(wide, repeats, axis=2).astype(x.dtype)
