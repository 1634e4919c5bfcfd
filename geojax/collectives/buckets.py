"""How the leaves of a tree are split and merged into the chunks that travel together.

The unit of length is the caller's: a column (one element for each rank) in the scattering
operations, an element in the all-reduce. A plan is plain data and knows nothing of arrays.

Example: leaves of lengths 5, 2, 3 and 1, all of one kind, and chunks of at most 4:

    leaf 0  [0:3]           chunk 0   the long leaf is split evenly; a piece of it shares with
    leaf 0  [3:5]           chunk 1   nobody, so that it is never copied together with others
    leaf 1  [0:2]           chunk 2   short leaves are merged with their neighbours, in order, as
    leaf 2  [0:3] + leaf 3  chunk 3   long as there is room: neighbours are ready at the same time
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """The units from `start` up to `stop` of one leaf; `leaf` is its position in tree order."""

    leaf: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of units in the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Pieces that travel in one message, one behind the other."""

    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """The number of units in the chunk."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class ChunkPlan:
    """Every unit of every leaf in exactly one chunk; the chunks in the order they are sent."""

    lengths: tuple[int, ...]
    """The length of each leaf."""
    chunks: tuple[Chunk, ...]

    @property
    def alone(self) -> frozenset[int]:
        """The leaves that are a chunk by themselves, whole."""
        return frozenset(
            chunk.pieces[0].leaf
            for chunk in self.chunks
            if len(chunk.pieces) == 1 and chunk.length == self.lengths[chunk.pieces[0].leaf]
        )


def plan_chunks(
    lengths: Sequence[int], kinds: Sequence[Hashable], limits: Sequence[int | None]
) -> ChunkPlan:
    """Split long leaves and merge short ones into chunks of at most the limit.

    Args:
        lengths: of each leaf, in units. An empty leaf is a chunk of its own: XLA crashes on empty
            pieces among others (seen in JAX 0.11.2).
        kinds: of each leaf; leaves of different kinds (another dtype, say) never share a chunk.
        limits: for each leaf, the most units of a chunk that it is in; equal for leaves of one
            kind. None: the leaf is a chunk of its own, neither split nor merged.
    """
    assert len(lengths) == len(kinds) == len(limits), "one length, kind and limit for each leaf"
    assert all(limit is None or limit > 0 for limit in limits), f"limits {limits}: not positive"
    chunks: list[list[Piece]] = []
    last_merged: dict[Hashable, list[Piece]] = {}
    for leaf, (length, kind, limit) in enumerate(zip(lengths, kinds, limits, strict=True)):
        if limit is None or length == 0:
            chunks.append([Piece(leaf, 0, length)])
        elif length > limit:
            chunks.extend([piece] for piece in _split(leaf, length, limit))
        else:
            chunk = last_merged.get(kind)
            if chunk is None or sum(piece.length for piece in chunk) + length > limit:
                chunk = last_merged[kind] = []
                chunks.append(chunk)
            chunk.append(Piece(leaf, 0, length))
    return ChunkPlan(tuple(lengths), tuple(Chunk(tuple(pieces)) for pieces in chunks))


def _split(leaf: int, length: int, limit: int) -> list[Piece]:
    """The fewest pieces of at most `limit`, their lengths at most one apart, longest first."""
    count = -(-length // limit)
    short, longer = divmod(length, count)
    starts = [index * short + min(index, longer) for index in range(count + 1)]
    return [Piece(leaf, start, stop) for start, stop in itertools.pairwise(starts)]
