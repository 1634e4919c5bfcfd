"""Merges of a byte-pair encoding whose file has pieces in an order, but not how they are merged.

Such an encoder joins two neighbors wherever both together are a piece, the first piece in the order
before all others. A `tokenizer.json` lists the pairs that are joined. A piece has a pair for each
place where it falls into two pieces.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

Piece = TypeVar("Piece", str, bytes)

LONGEST_PIECE = 1024
"""Most characters or bytes of a piece: the pairs of one are as many, and each is as long."""


def pairs_in_order(
    pieces: Iterable[Piece], ranks: Mapping[Piece, int]
) -> Iterable[tuple[Piece, Piece]]:
    """Yield the pairs that make each of `pieces`, in the order in which they are merged.

    Args:
        pieces: the pieces that a merge may make, the first one to be merged first.
        ranks: all that a piece may be made of, by an order that decides between its pairs.
    """
    for piece in pieces:
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
