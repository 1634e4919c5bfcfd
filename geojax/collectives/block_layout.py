"""Leaves as blocks of a scattered dimension: the block of each rank, and the padding.

A leaf of shape [.., size, ..] scattered along `dim` over `ranks` ranks is padded with zeros at the
end of `dim` to ranks * block; rank r holds the block from r * block (the tiled layout of
`lax.psum_scatter` and of a PartitionSpec). Its *rows* are the same numbers as [ranks, columns]:
row r is the block of rank r, flattened as it lies.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives.buckets import BucketPlan, plan_buckets, whole_blocks
from geojax.errors import UserError


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
