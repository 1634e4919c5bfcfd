"""What the hierarchical collectives send, by formula: to compare with what a program holds.

The formulas follow the same chunk plans and the same convention (`conventions`) as the operations
and `collective_traffic`, so the numbers agree exactly, padding included. For a tree of S bytes
that divides evenly, with r ranks inside a site and o sites:

    reduce-scatter   inside (r - 1) / r * S       across 2 (o - 1) / o * S / r
    all-gather       inside (r - 1) / r * S

In a wire format what is across is 2 (o - 1) times the message of each chunk's n / (r o) numbers; of
two sites, the message of its n / r numbers.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.collectives.block_layout import (
    BlockLayout,
    PyTree,
    block_layouts,
    leaf_names,
    plan_columns,
    plan_elements,
    spread_dims,
)
from geojax.collectives.wire_format import WireFormat
from geojax.hlo.conventions import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    permute_bytes,
    reduce_scatter_bytes,
)


@dataclass(frozen=True)
class PhaseBytes:
    """What one device sends."""

    inner: Fraction
    """Inside its site."""
    outer: Fraction
    """To other sites."""


def expected_all_reduce(
    tree: PyTree,
    *,
    inner_ranks: int,
    outer_ranks: int,
    chunk_bytes: int | None = None,
    wire: WireFormat | None = None,
    errors: bool = False,
) -> PhaseBytes:
    """What `all_reduce` sends; the leaves need only a shape and a dtype.

    The leaves are taken to vary over the same axes, as gradients do. With `errors`, what
    `all_reduce` sends with error feedback.
    """
    leaves = jax.tree.leaves(tree)
    dtypes = [leaf.dtype for leaf in leaves]
    plan = plan_elements(
        [int(np.prod(leaf.shape)) for leaf in leaves], dtypes, dtypes, inner_ranks, chunk_bytes
    )
    inner = outer = Fraction(0)
    for bucket in plan.buckets:
        dtype = np.dtype(dtypes[bucket.pieces[0].leaf])
        size = dtype.itemsize
        if outer_ranks == 1:
            inner += all_reduce_bytes(bucket.length * size, inner_ranks)
            continue
        shard = -(-bucket.length // inner_ranks)
        inner += reduce_scatter_bytes(shard * inner_ranks * size, inner_ranks)
        outer += _across(shard, dtype, outer_ranks, wire)
        inner += (2 if errors else 1) * all_gather_bytes(shard * size, inner_ranks)
    return PhaseBytes(inner, outer)


def expected_reduce_scatter(
    tree: PyTree,
    *,
    dims: PyTree,
    inner_ranks: int,
    outer_ranks: int,
    chunk_bytes: int | None = None,
    wire: WireFormat | None = None,
) -> PhaseBytes:
    """What `reduce_scatter` sends, with errors or without.

    The leaves are taken to vary over the same axes, as gradients do.
    """
    layouts, dtypes = _layouts(tree, dims, inner_ranks)
    plan = plan_columns(layouts, dtypes, dtypes, chunk_bytes)
    inner = outer = Fraction(0)
    for bucket in plan.buckets:
        dtype = dtypes[bucket.pieces[0].leaf]
        inner += reduce_scatter_bytes(bucket.length * inner_ranks * dtype.itemsize, inner_ranks)
        outer += _across(bucket.length, dtype, outer_ranks, wire)
    return PhaseBytes(inner, outer)


def expected_all_gather(
    tree: PyTree, *, dims: PyTree, inner_ranks: int, dtype: Any = None
) -> PhaseBytes:
    """What `all_gather` sends for the whole leaves `tree`, whatever its chunks."""
    inner = Fraction(0)
    for layout, held in zip(*_layouts(tree, dims, inner_ranks), strict=True):
        floating = dtype is not None and jnp.issubdtype(held, jnp.floating)
        sent = np.dtype(dtype) if floating else held
        inner += all_gather_bytes(layout.columns * sent.itemsize, inner_ranks)
    return PhaseBytes(inner, Fraction(0))


def _layouts(
    tree: PyTree, dims: PyTree, ranks: int
) -> tuple[tuple[BlockLayout, ...], list[np.dtype]]:
    """Of each leaf, and its dtype."""
    leaves = jax.tree.leaves(tree)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    layouts = block_layouts(leaf_names(tree), shapes, spread_dims(dims, tree), ranks)
    return layouts, [np.dtype(leaf.dtype) for leaf in leaves]


def _across(count: int, dtype: np.dtype, sites: int, wire: WireFormat | None) -> Fraction:
    """What the sum of `count` numbers over sites sends."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return all_reduce_bytes(count * dtype.itemsize, sites)
    if sites == 2:
        return permute_bytes(wire.message_bytes(count), sites)
    message = wire.message_bytes(-(-count // sites))
    return all_to_all_bytes(sites * message, sites) + all_gather_bytes(message, sites)
