"""The inputs of attention, and the rule by which its scores are made.

Shapes: B batch, S sequence, N heads, K kv heads, D head dim.
"""

from typing import NamedTuple

import jax


class Operands(NamedTuple):
    """Arrays that attention reads; a pytree, also of their gradients."""

    query: jax.Array
    """Queries [B, S, N, D]."""
    key: jax.Array
    """Keys [B, S, K, D]."""
    value: jax.Array
    """Values [B, S, K, D]."""
    segment_ids: jax.Array | None = None
    """Documents of the positions, int32 [B, S]; None: each sequence is one."""
    sinks: jax.Array | None = None
    """Scores [N], in at least float32, of a key without a value that every query sees; None: there
    is none."""
    is_windowed: jax.Array | None = None
    """True where this layer has the window of the rule, bool []; None: it has if the rule has."""


class ScoreRule(NamedTuple):
    """Static part of the scores: their factor, their cap, and the keys that have one."""

    scale: float
    """Factor of the products of queries and keys."""
    softcap: float | None = None
    """Bound of the scores, which become softcap * tanh(score / softcap); None: there is none."""
    window: int | None = None
    """Keys that a query sees, its own position's and those right before; None: all before."""
