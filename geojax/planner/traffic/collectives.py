"""Predicted bytes of the hierarchical collectives.

The formulas follow the same bucket plans and the same convention (`conventions`) as the operations
and `collective_traffic`, so the numbers agree exactly, padding included. For a tree of S bytes
that divides evenly, with r ranks inside a site and o sites:

    reduce-scatter   inside (r - 1) / r * S       across 2 (o - 1) / o * S / r
    all-gather       inside (r - 1) / r * S

In a wire format a device sends across 2 (o - 1) times the message of each bucket's n / (r o)
numbers; with two sites, the message of its n / r numbers.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.collectives.block_layout import (
    BlockLayout,
    block_layouts,
    plan_columns,
    plan_elements,
    share_length,
)
from geojax.collectives.codec import part_length
from geojax.collectives.like_trees import PyTree, leaf_names, spread_dims
from geojax.collectives.wire_format import WireFormat, block_of
from geojax.hlo.conventions import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    permute_bytes,
    reduce_scatter_bytes,
)


@dataclass(frozen=True)
class PhaseBytes:
    """The bytes that one device sends in the two phases of a hierarchical collective."""

    intra: Fraction
    """The bytes sent inside its site."""
    messages: tuple[Fraction, ...] = ()
    """The bytes of the sum over sites of each bucket."""
    sizes: tuple[int, ...] = ()
    """The bytes of each such bucket in a site, all ranks together, in the leaf's dtype."""

    @property
    def inter(self) -> Fraction:
        """The bytes sent to other sites."""
        return sum(self.messages, Fraction(0))


def predicted_all_reduce(
    tree: PyTree,
    *,
    intra_ranks: int,
    inter_ranks: int,
    bucket_bytes: int | None = None,
    wire: WireFormat | None = None,
    errors: bool = False,
) -> PhaseBytes:
    """Predict what `all_reduce` sends; the leaves need only a shape and a dtype.

    The leaves are taken to vary over the same axes, as gradients do. With `errors`, error feedback
    gathers once more inside the site.
    """
    leaves = jax.tree.leaves(tree)
    dtypes = [leaf.dtype for leaf in leaves]
    plan = plan_elements(
        [int(np.prod(leaf.shape)) for leaf in leaves],
        dtypes,
        dtypes,
        intra_ranks,
        bucket_bytes,
        block_of(wire),
    )
    intra, messages, sizes = Fraction(0), [], []
    for bucket in plan.buckets:
        dtype = np.dtype(dtypes[bucket.pieces[0].leaf])
        size = dtype.itemsize
        if inter_ranks == 1:
            intra += all_reduce_bytes(bucket.length * size, intra_ranks)
            continue
        shard = share_length(bucket.length, intra_ranks, block_of(wire))
        intra += reduce_scatter_bytes(shard * intra_ranks * size, intra_ranks)
        messages.append(_across(shard, dtype, inter_ranks, wire))
        sizes.append(intra_ranks * shard * size)
        intra += (2 if errors else 1) * all_gather_bytes(shard * size, intra_ranks)
    return PhaseBytes(intra, tuple(messages), tuple(sizes))


def predicted_reduce_scatter(
    tree: PyTree,
    *,
    dims: PyTree,
    intra_ranks: int,
    inter_ranks: int,
    bucket_bytes: int | None = None,
    wire: WireFormat | None = None,
) -> PhaseBytes:
    """Predict what `reduce_scatter` sends, with error feedback or without.

    The leaves are taken to vary over the same axes, as gradients do.
    """
    layouts, dtypes = _layouts(tree, dims, intra_ranks)
    plan = plan_columns(layouts, dtypes, dtypes, bucket_bytes, block_of(wire))
    intra, messages = Fraction(0), []
    for bucket in plan.buckets:
        dtype = dtypes[bucket.pieces[0].leaf]
        columns = sum(piece.length for piece in bucket.pieces)  # padded when they are scattered
        intra += reduce_scatter_bytes(columns * intra_ranks * dtype.itemsize, intra_ranks)
        messages.append(_across(bucket.length, dtype, inter_ranks, wire))
    return PhaseBytes(intra, tuple(messages))


def predicted_all_gather(
    tree: PyTree, *, dims: PyTree, intra_ranks: int, dtype: Any = None
) -> PhaseBytes:
    """Predict what `all_gather` sends for the whole leaves `tree`, in buckets of any size."""
    intra = Fraction(0)
    for layout, leaf_dtype in zip(*_layouts(tree, dims, intra_ranks), strict=True):
        floating = dtype is not None and jnp.issubdtype(leaf_dtype, jnp.floating)
        sent = np.dtype(dtype) if floating else leaf_dtype
        intra += all_gather_bytes(layout.columns * sent.itemsize, intra_ranks)
    return PhaseBytes(intra)


def _layouts(
    tree: PyTree, dims: PyTree, ranks: int
) -> tuple[tuple[BlockLayout, ...], list[np.dtype]]:
    """Return the layout and the dtype of each leaf."""
    leaves = jax.tree.leaves(tree)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    layouts = block_layouts(leaf_names(tree), shapes, spread_dims(dims, tree), ranks)
    return layouts, [np.dtype(leaf.dtype) for leaf in leaves]


def _across(count: int, dtype: np.dtype, sites: int, wire: WireFormat | None) -> Fraction:
    """Predict what the sum of `count` numbers over sites sends."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return all_reduce_bytes(count * dtype.itemsize, sites)
    if sites == 2:
        return permute_bytes(wire.message_bytes(count), sites)
    message = wire.message_bytes(part_length(count, sites, wire))
    return all_to_all_bytes(sites * message, sites) + all_gather_bytes(message, sites)
