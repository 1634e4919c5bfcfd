"""Positions of a sequence that each rank of the `context` axis holds.

Under causal attention the end of a sequence costs more than its beginning. `ring` and `all_gather`
therefore cut a sequence into 2 C pieces and give rank c of C the pieces c and 2 C - 1 - c
(zig-zag), so that every rank has the same work. `ulysses` puts whole sequences together before
attention and keeps the natural order.

    C = 2, pieces of a sequence  0 1 2 3      zig-zag: rank 0 holds 0 3, rank 1 holds 1 2
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives.axes import Tree
from geojax.models.parallel.parallelism import Parallelism


def position_order(sequence: int, parallelism: Parallelism) -> np.ndarray:
    """Return the order in which the positions of a sequence lie on `context`, int [sequence].

    The host applies it to a batch; the ranks hold contiguous shares of the result.
    """
    ranks = parallelism.context
    if not _zigzag(parallelism):
        return np.arange(sequence)
    chunks = np.arange(sequence).reshape(2 * ranks, -1)
    return np.concatenate([chunks[[rank, 2 * ranks - 1 - rank]].ravel() for rank in range(ranks)])


def local_positions(length: int, parallelism: Parallelism) -> jax.Array:
    """Return the `length` positions of the sequence that this rank holds, int32 [length].

    Without context parallelism they are 0, 1, ...; with it they vary over `context`.
    """
    inside = jnp.arange(length, dtype=jnp.int32)
    if parallelism.context == 1:
        return inside
    rank = lax.axis_index("context")
    if not _zigzag(parallelism):
        return rank * length + inside
    chunk = length // 2
    second = (2 * parallelism.context - 1 - rank) * chunk
    return jnp.where(inside < chunk, rank * chunk + inside, second + inside - chunk)


def position_multiple(parallelism: Parallelism) -> int:
    """Return the number that a sequence's length must be a multiple of, for `context`."""
    return parallelism.context * (2 if _zigzag(parallelism) else 1)


def split_chunks(tree: Tree) -> tuple[Tree, Tree]:
    """Split arrays [B, S, ...] into the two pieces that a rank holds in zig-zag order."""
    first = jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)
    second = jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)
    return first, second


def _zigzag(parallelism: Parallelism) -> bool:
    return parallelism.context > 1 and parallelism.context_method != "ulysses"
