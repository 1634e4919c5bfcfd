"""Buckets: the leaves of a tree are split and merged, and each bucket travels as one message.

The unit of length is the caller's: a column (one element for each rank) in the scattering
operations, an element in the all-reduce. A plan is plain data.

Example: leaves of lengths 5, 2, 3 and 1, all of one kind, and buckets of at most 4:

    leaf 0  [0:3]           bucket 0   a long leaf is split evenly; its pieces are never merged, so
    leaf 0  [3:5]           bucket 1   that a long leaf is not copied together with others
    leaf 1  [0:2]           bucket 2   short leaves are merged with their neighbors, in order, as
    leaf 2  [0:3] + leaf 3  bucket 3   long as there is room: neighbors are ready at the same time

A wire format may quantize blocks of units. A leaf is then split between blocks only, and leaves
that share a bucket are padded to whole ones, so that its blocks never depend on the buckets.
"""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class LeafPiece:
    """The units from `start` up to `stop` of one leaf; `leaf` is its position in tree order."""

    leaf: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of units in the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel in one message, one after the other."""

    pieces: tuple[LeafPiece, ...]
    block: int = 1
    """The units of a block; several pieces are padded to whole ones each."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """The units that each piece takes in the bucket."""
        block = self.block if len(self.pieces) > 1 else 1
        return tuple(whole_blocks(piece.length, block) for piece in self.pieces)

    @property
    def length(self) -> int:
        """The number of units in the bucket."""
        return sum(self.lengths)

    def take(self, arrays: Mapping[int, jax.Array], dim: int) -> jax.Array:
        """Concatenate the pieces along `dim`, unpadded, out of the arrays of the leaves."""
        pieces = [
            lax.slice_in_dim(arrays[piece.leaf], piece.start, piece.stop, axis=dim)
            for piece in self.pieces
        ]
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=dim)

    def pad(self, array: jax.Array, dim: int) -> jax.Array:
        """Append zeros to each piece of `array`, where they lie along `dim`, up to whole blocks."""
        if array.shape[dim] == self.length:
            return array
        padded, start = [], 0
        for piece, length in zip(self.pieces, self.lengths, strict=True):
            own = lax.slice_in_dim(array, start, start + piece.length, axis=dim)
            missing = [(0, length - piece.length if at == dim else 0) for at in range(array.ndim)]
            padded.append(jnp.pad(own, missing))
            start += piece.length
        return jnp.concatenate(padded, axis=dim)


@dataclass(frozen=True)
class BucketPlan:
    """Every unit of every leaf in exactly one bucket; the buckets in the order they are sent."""

    lengths: tuple[int, ...]
    """The length of each leaf."""
    buckets: tuple[Bucket, ...]

    @property
    def unmerged(self) -> frozenset[int]:
        """The leaves that are neither split nor merged: each is one bucket by itself."""
        return frozenset(
            bucket.pieces[0].leaf
            for bucket in self.buckets
            if len(bucket.pieces) == 1 and bucket.length == self.lengths[bucket.pieces[0].leaf]
        )


class Collected:
    """The leaves again, joined from the arrays of buckets."""

    def __init__(self, leaves: int, dim: int) -> None:
        self._dim = dim
        self._pieces: list[list[jax.Array]] = [[] for _ in range(leaves)]

    def put(self, bucket: Bucket, array: jax.Array) -> None:
        """Take the pieces of a bucket out of its array, where they lie along `dim`."""
        start = 0
        for piece, length in zip(bucket.pieces, bucket.lengths, strict=True):
            stop = start + piece.length
            self._pieces[piece.leaf].append(lax.slice_in_dim(array, start, stop, axis=self._dim))
            start += length

    def join(self, leaf: int) -> jax.Array:
        """Concatenate all pieces of a leaf, in order."""
        pieces = self._pieces[leaf]
        return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=self._dim)


def plan_buckets(
    lengths: Sequence[int],
    kinds: Sequence[Hashable],
    limits: Sequence[int | None],
    block: int = 1,
) -> BucketPlan:
    """Split long leaves and merge short ones into buckets of at most the limit.

    Args:
        lengths: of each leaf, in units. An empty leaf is a bucket of its own: XLA crashes on empty
            pieces among others (seen in JAX 0.11.2).
        kinds: of each leaf; leaves of different kinds (another dtype, say) never share a bucket.
        limits: for each leaf, the most units of a bucket that it is in; equal for leaves of one
            kind. None: the leaf is a bucket of its own, neither split nor merged.
        block: the units of a block, which a bucket holds whole; at least one, whatever its limit.
    """
    assert len(lengths) == len(kinds) == len(limits), "one length, kind and limit for each leaf"
    assert all(limit is None or limit > 0 for limit in limits), f"limits must be positive: {limits}"
    buckets: list[list[LeafPiece]] = []
    last_merged: dict[Hashable, list[LeafPiece]] = {}
    for leaf, (length, kind, limit) in enumerate(zip(lengths, kinds, limits, strict=True)):
        if limit is None or length == 0:
            buckets.append([LeafPiece(leaf, 0, length)])
        elif length > max(limit, block):
            buckets.extend([piece] for piece in _split(leaf, length, limit, block))
        else:
            bucket = last_merged.get(kind)
            held = sum(whole_blocks(piece.length, block) for piece in bucket or ())
            if bucket is None or held + whole_blocks(length, block) > limit:
                bucket = last_merged[kind] = []
                buckets.append(bucket)
            bucket.append(LeafPiece(leaf, 0, length))
    return BucketPlan(tuple(lengths), tuple(Bucket(tuple(pieces), block) for pieces in buckets))


def whole_blocks(length: int, block: int) -> int:
    """Round `length` up to a multiple of `block`."""
    return -(-length // block) * block


def _split(leaf: int, length: int, limit: int, block: int) -> list[LeafPiece]:
    """Cut a leaf into the fewest pieces of at most `limit`; they differ by one block at most."""
    blocks = -(-length // block)
    count = -(-blocks // max(limit // block, 1))
    short, longer = divmod(blocks, count)
    starts = [block * (index * short + min(index, longer)) for index in range(count)]
    return [LeafPiece(leaf, start, stop) for start, stop in itertools.pairwise([*starts, length])]
