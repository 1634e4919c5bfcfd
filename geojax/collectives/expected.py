"""What the hierarchical collectives send, by formula: to compare with what a program holds.

The formulas follow the same chunk plans and the same convention (`conventions`) as the operations
and `collective_traffic`, so the numbers agree exactly, padding included. For a tree of S bytes
that divides evenly, with r ranks inside a site and o sites:

    reduce-scatter   inside (r - 1) / r * S       across 2 (o - 1) / o * S / r
    all-gather       inside (r - 1) / r * S
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from geojax.collectives.conventions import (
    all_gather_bytes,
    all_reduce_bytes,
    reduce_scatter_bytes,
)
from geojax.collectives.layout import (
    PyTree,
    block_layouts,
    leaf_names,
    plan_elements,
    spread_dims,
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
    wire_dtype: Any = None,
) -> PhaseBytes:
    """What `hierarchical_all_reduce` sends; the leaves need only a shape and a dtype.

    The leaves are taken to vary over the same axes, as gradients do.
    """
    leaves = jax.tree.leaves(tree)
    dtypes = [leaf.dtype for leaf in leaves]
    plan = plan_elements(
        [int(np.prod(leaf.shape)) for leaf in leaves], dtypes, dtypes, inner_ranks, chunk_bytes
    )
    inner = outer = Fraction(0)
    for chunk in plan.chunks:
        dtype = np.dtype(dtypes[chunk.pieces[0].leaf])
        wire = _crossing(dtype, wire_dtype).itemsize
        size = dtype.itemsize
        if outer_ranks == 1:
            inner += all_reduce_bytes(chunk.length * size, inner_ranks)
            continue
        shard = -(-chunk.length // inner_ranks)
        inner += reduce_scatter_bytes(shard * inner_ranks * size, inner_ranks)
        outer += all_reduce_bytes(shard * wire, outer_ranks)
        inner += all_gather_bytes(shard * min(wire, size), inner_ranks)
    return PhaseBytes(inner, outer)


def expected_reduce_scatter(
    tree: PyTree,
    *,
    dims: PyTree,
    inner_ranks: int,
    outer_ranks: int,
    wire_dtype: Any = None,
) -> PhaseBytes:
    """What `hierarchical_reduce_scatter` sends, whatever its chunks."""
    inner = outer = Fraction(0)
    for columns, dtype in _scattered(tree, dims, inner_ranks):
        inner += reduce_scatter_bytes(columns * inner_ranks * dtype.itemsize, inner_ranks)
        outer += all_reduce_bytes(columns * _crossing(dtype, wire_dtype).itemsize, outer_ranks)
    return PhaseBytes(inner, outer)


def expected_all_gather(
    tree: PyTree, *, dims: PyTree, inner_ranks: int, dtype: Any = None
) -> PhaseBytes:
    """What `all_gather` sends for the whole leaves `tree`, whatever its chunks."""
    inner = Fraction(0)
    for columns, held in _scattered(tree, dims, inner_ranks):
        inner += all_gather_bytes(columns * _crossing(held, dtype).itemsize, inner_ranks)
    return PhaseBytes(inner, Fraction(0))


def _scattered(tree: PyTree, dims: PyTree, ranks: int) -> list[tuple[int, np.dtype]]:
    """For each leaf the elements of a shard, and the dtype."""
    leaves = jax.tree.leaves(tree)
    shapes = [tuple(leaf.shape) for leaf in leaves]
    layouts = block_layouts(leaf_names(tree), shapes, spread_dims(dims, tree), ranks)
    return [
        (layout.columns, np.dtype(leaf.dtype)) for layout, leaf in zip(layouts, leaves, strict=True)
    ]


def _crossing(dtype: np.dtype, wire_dtype: Any) -> np.dtype:
    floating = wire_dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(wire_dtype) if floating else dtype
