"""The arrays of a chunk: put together before it travels, taken apart when it has come."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.buckets import Chunk


def take(chunk: Chunk, arrays: Mapping[int, jax.Array], axis: int) -> jax.Array:
    """The pieces of a chunk, one behind the other along `axis`; `arrays` by leaf."""
    pieces = [
        lax.slice_in_dim(arrays[piece.leaf], piece.start, piece.stop, axis=axis)
        for piece in chunk.pieces
    ]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=axis)


class Parts:
    """Collects the pieces of each leaf from the chunks that come back."""

    def __init__(self, leaves: int, axis: int) -> None:
        self._axis = axis
        self._parts: list[list[jax.Array]] = [[] for _ in range(leaves)]

    def put(self, chunk: Chunk, array: jax.Array) -> None:
        """`array` holds the chunk's pieces, one behind the other along the axis."""
        start = 0
        for piece in chunk.pieces:
            stop = start + piece.length
            self._parts[piece.leaf].append(lax.slice_in_dim(array, start, stop, axis=self._axis))
            start = stop

    def join(self, leaf: int) -> jax.Array:
        """All pieces of a leaf, in order."""
        parts = self._parts[leaf]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=self._axis)
