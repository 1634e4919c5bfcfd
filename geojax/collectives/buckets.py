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

A leaf of shape [.., size, ..] scattered along `dim` over `ranks` ranks is padded with zeros at the
end of `dim` to ranks * block; rank r holds the block from r * block (the tiled layout of
`lax.psum_scatter` and of a PartitionSpec). Its *rows* are the same numbers as [ranks, columns]:
row r is the block of rank r, flattened as it lies.
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.errors import UserError


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


@dataclass(frozen=True)
class BlockLayout:
    """The layout of one leaf on the ranks of a site."""

    shape: tuple[int, ...]
    """The shape of the whole leaf, without padding."""
    dim: int
    """The scattered dimension, counted from the front."""
    ranks: int

    @property
    def block(self) -> int:
        """The length of a rank's block along `dim`, padding included."""
        return -(-self.shape[self.dim] // self.ranks)

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what a rank holds."""
        return (*self.shape[: self.dim], self.block, *self.shape[self.dim + 1 :])

    @property
    def columns(self) -> int:
        """The number of elements of a shard."""
        return math.prod(self.shard_shape)

    def pad(self, leaf: jax.Array) -> jax.Array:
        """Append zeros to `leaf` along `dim`, so that its length is ranks * block."""
        missing = self.ranks * self.block - self.shape[self.dim]
        if missing == 0:
            return leaf
        widths = [(0, missing if dim == self.dim else 0, 0) for dim in range(leaf.ndim)]
        return lax.pad(leaf, jnp.zeros((), leaf.dtype), widths)

    def trim(self, padded: jax.Array) -> jax.Array:
        """Cut the padding off `padded` [.., ranks * block, ..]."""
        if padded.shape == self.shape:
            return padded
        return lax.slice_in_dim(padded, 0, self.shape[self.dim], axis=self.dim)

    def to_rows(self, leaf: jax.Array) -> jax.Array:
        """Reshape `leaf` to [ranks, columns], padded."""
        parts = self.pad(leaf).reshape(self._parted)
        return jnp.moveaxis(parts, self.dim, 0).reshape(self.ranks, self.columns)

    def from_rows(self, rows: jax.Array) -> jax.Array:
        """Reshape [ranks, columns] to the whole leaf, the padding trimmed."""
        parts = jnp.moveaxis(rows.reshape(self.ranks, *self.shard_shape), 0, self.dim)
        padded = (*self.shape[: self.dim], self.ranks * self.block, *self.shape[self.dim + 1 :])
        return self.trim(parts.reshape(padded))

    def to_row(self, shard: jax.Array) -> jax.Array:
        """Reshape a shard to its row [columns]."""
        return shard.reshape(self.columns)

    def from_row(self, row: jax.Array) -> jax.Array:
        """Reshape a row [columns] to its shard."""
        return row.reshape(self.shard_shape)

    @property
    def _parted(self) -> tuple[int, ...]:
        """The padded shape with `dim` divided into ranks and block."""
        return (*self.shape[: self.dim], self.ranks, self.block, *self.shape[self.dim + 1 :])


def block_layouts(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], dims: Sequence[int], ranks: int
) -> tuple[BlockLayout, ...]:
    """Lay out each leaf; `names` are for the messages.

    Raises:
        UserError: a leaf is a scalar, or does not have the dimension that it is scattered along.
    """
    layouts = []
    for name, shape, dim in zip(names, shapes, dims, strict=True):
        if not shape:
            raise UserError(
                f"collectives: leaf{name} is a scalar, which has no dimension to scatter; give it "
                "shape (1,), or sum it with all_reduce"
            )
        if not -len(shape) <= dim < len(shape):
            raise UserError(
                f"collectives: leaf{name} has shape {shape} and no dimension {dim} to scatter; "
                f"dims must lie from 0 to {len(shape) - 1}"
            )
        layouts.append(BlockLayout(tuple(shape), dim % len(shape), ranks))
    return tuple(layouts)


def check_shards(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], layouts: Sequence[BlockLayout]
) -> None:
    """Raise a UserError when a shard does not have the shape that its layout gives it."""
    for name, shape, layout in zip(names, shapes, layouts, strict=True):
        if shape != layout.shard_shape:
            raise UserError(
                f"collectives: shard{name} has shape {shape}; dimension {layout.dim} of "
                f"{layout.shape} scattered over {layout.ranks} ranks gives {layout.shard_shape}"
            )


def bucket_limit(bucket_bytes: int | None, unit_bytes: int) -> int | None:
    """Return how many units of `unit_bytes` fit into `bucket_bytes`; None stays None.

    Raises:
        UserError: not even one unit fits.
    """
    if bucket_bytes is None:
        return None
    if bucket_bytes < unit_bytes:
        raise UserError(
            f"collectives: bucket_bytes={bucket_bytes} cannot hold one element for each rank, "
            f"which takes {unit_bytes} bytes; give at least that (megabytes are usual), or None"
        )
    return bucket_bytes // unit_bytes


def plan_columns(
    layouts: Sequence[BlockLayout],
    dtypes: Sequence[Any],
    kinds: Sequence[Hashable],
    bucket_bytes: int | None,
    block: int = 1,
) -> BucketPlan:
    """Plan buckets of scattered leaves, in columns; `dtypes` are those that travel in the site.

    `block` is the numbers of a block of the wire format.
    """
    limits = [
        bucket_limit(bucket_bytes, layout.ranks * np.dtype(dtype).itemsize)
        for layout, dtype in zip(layouts, dtypes, strict=True)
    ]
    return plan_buckets([layout.columns for layout in layouts], kinds, limits, block)


def plan_elements(
    sizes: Sequence[int],
    dtypes: Sequence[Any],
    kinds: Sequence[Hashable],
    ranks: int,
    bucket_bytes: int | None,
    block: int = 1,
) -> BucketPlan:
    """Plan buckets of flattened leaves, in elements; a full one is a multiple of `ranks` long.

    `block` is the numbers of a block of the wire format.
    """
    limits: list[int | None] = []
    for dtype in dtypes:
        columns = bucket_limit(bucket_bytes, ranks * np.dtype(dtype).itemsize)
        limits.append(None if columns is None else columns * ranks)
    return plan_buckets(sizes, kinds, limits, block)


def share_length(length: int, ranks: int, block: int) -> int:
    """Return the numbers of each rank's share of a flat bucket: in whole blocks, if several do."""
    return length if ranks == 1 else whole_blocks(length, ranks * block) // ranks
