"""Which positions of a row a rank of the `context` axis holds.

Under causal attention the end of a row costs more than its beginning, so `ring` and `all_gather`
cut a row into 2 C chunks and give rank c of C the chunks c and 2 C - 1 - c (zig-zag): every rank
has the same work. `ulysses` puts whole rows together before attention and keeps the natural order.

    C = 2, chunks of a row  0 1 2 3      zig-zag: rank 0 holds 0 3, rank 1 holds 1 2
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.varying import Tree


def position_order(sequence: int, parallelism: Parallelism) -> np.ndarray:
    """int [sequence]: where each column of the batch, as it is cut over `context`, comes from.

    The host applies it to the columns of a batch; contiguous shares of the result are what the
    ranks hold.
    """
    ranks = parallelism.context
    if not _zigzag(parallelism):
        return np.arange(sequence)
    chunks = np.arange(sequence).reshape(2 * ranks, -1)
    return np.concatenate([chunks[[rank, 2 * ranks - 1 - rank]].ravel() for rank in range(ranks)])


def local_positions(length: int, parallelism: Parallelism) -> jax.Array:
    """int32 [length]: the positions in the row of the columns that this rank holds.

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
    """A sequence must be a multiple of this to be cut over `context`."""
    return parallelism.context * (2 if _zigzag(parallelism) else 1)


def split_chunks(tree: Tree) -> tuple[Tree, Tree]:
    """The two chunks that a rank holds in zig-zag order, of arrays [rows, columns, ...]."""
    first = jax.tree.map(lambda x: x[:, : x.shape[1] // 2], tree)
    second = jax.tree.map(lambda x: x[:, x.shape[1] // 2 :], tree)
    return first, second


def _zigzag(parallelism: Parallelism) -> bool:
    return parallelism.context > 1 and parallelism.context_method != "ulysses"
