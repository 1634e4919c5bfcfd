"""Sums and gathers in two phases: inside a site over `inner`, between sites over `outer`.

A flat all-reduce over both would send nearly twice the tensor through every device's share of the
long link. In two phases a rank first owns the site's sum of 1/ranks of the tensor, and only that
part crosses (the hierarchical all-reduce of multi-data-centre training):

    hierarchical_all_reduce       psum_scatter(inner) -> psum(outer) -> all_gather(inner)
    hierarchical_reduce_scatter   psum_scatter(inner) -> psum(outer)
    all_gather                                                          all_gather(inner)

All three work on pytrees inside `jax.shard_map`, under `check_vma=True` or False. `inner` and
`outer` are an axis name or several; with several, ranks are counted with the last name fastest, as
in a PartitionSpec. An axis of size 1 costs nothing, and `outer` may be empty.

Chunks. `chunk_bytes` bounds the bytes of one message of the in-site phase: all ranks' blocks
together, in the dtype that this phase sends; what crosses `outer` for it is 1/ranks of that on each
device. Long leaves are split, short ones merged with their neighbours of the same dtype and the
same varying axes (`geojax.collectives.chunks`). Chunks do not depend on one another, so the in-site
phase of one may run beside the cross-site phases of others; the flags of `geojax.runtime` keep XLA
for GPUs from merging them again. None: every leaf is one chunk, sent as it lies, without a copy
unless it needs padding.

Wire dtype. `wire_dtype` is what crosses `outer`, for floating-point leaves: the site's sum is
rounded to it, summed in it by `psum`, and the result comes back in the leaf's dtype. The in-site
sum is always in the leaf's dtype. The all-gather of `hierarchical_all_reduce`, which follows the
rounding, sends the narrower of the two dtypes, and so loses nothing more.

Derivatives are those of the plain `psum` of the same values: linear, with casts where a wire dtype
rounds (cotangents round in the same places).
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives.axes import (
    AxisNames,
    axis_tuple,
    check_disjoint,
    drop_single,
    split_by_size,
    to_varying,
    varying_axes,
)
from geojax.collectives.chunks import Chunk
from geojax.collectives.layout import (
    PyTree,
    block_layouts,
    check_shards,
    leaf_names,
    plan_columns,
    plan_elements,
    spread_dims,
    spread_shapes,
)
from geojax.errors import UserError

Tree = TypeVar("Tree")


def hierarchical_all_reduce(
    tree: Tree,
    inner: AxisNames,
    outer: AxisNames,
    *,
    chunk_bytes: int | None = None,
    wire_dtype: Any = None,
) -> Tree:
    """The sum of `tree` over all ranks of `inner` and `outer`, the same on each of them.

    Args:
        tree: arrays of any shape, scalars among them; a chunk is padded where it does not divide.
        inner: the axes inside a site.
        outer: the axes between sites. Without any longer than 1, the sum is one psum over `inner`.
        chunk_bytes: the most bytes of one in-site message (see the module).
        wire_dtype: what crosses `outer` instead of the leaf's dtype (see the module).

    Returns:
        Like `tree`, in the leaves' shapes and dtypes. Varying over neither `inner` nor `outer`, so
        that `out_specs=P()` is accepted; over other axes as the leaf was.

    Raises:
        UserError: an unknown axis or one named twice, a boolean leaf, a wire dtype that is not a
            floating-point one, or chunks that cannot hold an element for each rank.
    """
    axes = _resolve(inner, outer)
    leaves, structure = _summands(tree, wire_dtype)
    vectors = [axes.drop_singles(leaf).reshape(leaf.size) for leaf in leaves]
    plan = plan_elements(
        [vector.size for vector in vectors], *_dtypes_and_kinds(vectors), axes.ranks, chunk_bytes
    )
    parts = _Parts(len(leaves), axis=0)
    for chunk in plan.chunks:
        vector = _take(chunk, dict(enumerate(vectors)), axis=0)
        parts.put(chunk, _all_reduce_vector(vector, axes, wire_dtype))
    results = [parts.join(leaf).reshape(array.shape) for leaf, array in enumerate(leaves)]
    return jax.tree.unflatten(structure, results)


def hierarchical_reduce_scatter(
    tree: Tree,
    inner: AxisNames,
    outer: AxisNames,
    *,
    dims: PyTree,
    chunk_bytes: int | None = None,
    wire_dtype: Any = None,
) -> Tree:
    """The sum of `tree` over `inner` and `outer`, of which each rank of `inner` keeps its block.

    Args:
        tree: arrays of one dimension or more.
        inner: the axes inside a site, over whose ranks the result is scattered.
        outer: the axes between sites; every site ends with the same shards.
        dims: the dimension along which each leaf is scattered: one int for all, or a tree.
        chunk_bytes: the most bytes of one in-site message (see the module).
        wire_dtype: what crosses `outer` instead of the leaf's dtype (see the module).

    Returns:
        The shards: a leaf [.., size, ..] becomes [.., block, ..] with block = ceil(size / ranks).
        Rank r holds the entries from r * block on, and zeros past the end of the leaf. Varying over
        `inner` (its axes of size 1 too) and not over `outer`; over other axes as the leaf was.

    Raises:
        UserError: as `hierarchical_all_reduce`; or a scalar leaf, `dims` that do not fit, or a leaf
            that differs along `inner` and not along `outer`: a gradient summed there already.
    """
    axes = _resolve(inner, outer)
    leaves, structure = _summands(tree, wire_dtype)
    _refuse_summed(tree, leaves, axes)
    leaves = [axes.drop_singles(leaf) for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    layouts = block_layouts(leaf_names(tree), shapes, spread_dims(dims, tree), axes.ranks)
    plan = plan_columns(layouts, *_dtypes_and_kinds(leaves), chunk_bytes)
    alone = plan.alone
    rows = {
        leaf: layout.to_rows(leaves[leaf])
        for leaf, layout in enumerate(layouts)
        if leaf not in alone
    }
    shards: dict[int, jax.Array] = {}
    parts = _Parts(len(leaves), axis=0)
    for chunk in plan.chunks:
        leaf = chunk.pieces[0].leaf
        if leaf in alone:
            layout = layouts[leaf]
            shards[leaf] = _sum_to_shards(layout.pad(leaves[leaf]), layout.dim, axes, wire_dtype)
        else:
            shard = _sum_to_shards(_take(chunk, rows, axis=1), 0, axes, wire_dtype)
            parts.put(chunk, shard.reshape(chunk.length))
    for leaf in rows:
        shards[leaf] = layouts[leaf].from_row(parts.join(leaf))
    results = [to_varying(shards[leaf], axes.all_inner) for leaf in range(len(leaves))]
    return jax.tree.unflatten(structure, results)


def all_gather(
    shards: Tree,
    inner: AxisNames,
    *,
    dims: PyTree,
    shapes: PyTree,
    chunk_bytes: int | None = None,
    dtype: Any = None,
    to: Literal["varying", "invarying"] = "varying",
) -> Tree:
    """The whole leaves from the shards that the ranks of `inner` hold; padding is trimmed.

    The inverse of the scattering in `hierarchical_reduce_scatter`.

    Args:
        shards: arrays [.., block, ..], rank r holding the entries from r * block on.
        inner: the axes over whose ranks the leaves are scattered.
        dims: the dimension along which each leaf is scattered: one int for all, or a tree.
        shapes: the shapes of the whole leaves: a tree of tuples or of things with a `.shape`.
        chunk_bytes: the most bytes of one message (see the module).
        dtype: floating-point shards are cast to it before they are sent, and stay so: bfloat16
            weights from float32 masters cost half. The derivative then sums cotangents in it.
        to: the type of the result. "varying" over all of `inner`, as `lax.all_gather` gives it:
            the derivative with respect to such a whole leaf is a rank's own, not yet summed, and
            that of the gather is a psum_scatter. "invarying": the leaves are known to be equal on
            all ranks (`out_specs=P()` is accepted), and differentiating with respect to them sums.

    Returns:
        The whole leaves. Over axes other than `inner` they vary as the shards did.

    Raises:
        UserError: an unknown axis, `dims` or `shapes` that do not fit, or chunks that cannot hold
            an element for each rank.
    """
    axes = _resolve(inner, ())
    if to not in ("varying", "invarying"):
        raise UserError(f"collectives: all_gather to={to!r}; known are 'varying' and 'invarying'")
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, shards))
    leaves = [axes.drop_singles(_cast_floating(leaf, dtype)) for leaf in leaves]
    names = leaf_names(shards)
    layouts = block_layouts(
        names, spread_shapes(shapes, shards), spread_dims(dims, shards), axes.ranks
    )
    check_shards(names, [leaf.shape for leaf in leaves], layouts)
    plan = plan_columns(layouts, *_dtypes_and_kinds(leaves), chunk_bytes)
    alone = plan.alone
    rows = {
        leaf: layout.to_row(leaves[leaf])
        for leaf, layout in enumerate(layouts)
        if leaf not in alone
    }
    wholes: dict[int, jax.Array] = {}
    parts = _Parts(len(leaves), axis=1)
    for chunk in plan.chunks:
        leaf = chunk.pieces[0].leaf
        if leaf in alone:
            whole = _gather(leaves[leaf], layouts[leaf].dim, axes, to)
            wholes[leaf] = layouts[leaf].trim(whole)
        else:
            row = _take(chunk, rows, axis=0)
            parts.put(chunk, _gather(row[None], 0, axes, to))
    for leaf in rows:
        wholes[leaf] = layouts[leaf].from_rows(parts.join(leaf))
    kept = axes.all_inner if to == "varying" else ()
    return jax.tree.unflatten(structure, [to_varying(wholes[i], kept) for i in range(len(leaves))])


@dataclass(frozen=True)
class _Axes:
    """`inner` and `outer` without their axes of size 1, which only change types."""

    inner: tuple[str, ...]
    outer: tuple[str, ...]
    single: tuple[str, ...]
    all_inner: tuple[str, ...]
    ranks: int
    """Over all of `inner`."""

    def drop_singles(self, leaf: jax.Array) -> jax.Array:
        return drop_single(leaf, self.single)


def _resolve(inner: AxisNames, outer: AxisNames) -> _Axes:
    all_inner, all_outer = axis_tuple(inner), axis_tuple(outer)
    check_disjoint(all_inner, all_outer)
    long_inner, single_inner, ranks = split_by_size(all_inner)
    long_outer, single_outer, _ = split_by_size(all_outer)
    return _Axes(long_inner, long_outer, single_inner + single_outer, all_inner, ranks)


def _summands(tree: PyTree, wire_dtype: Any) -> tuple[list[jax.Array], Any]:
    if wire_dtype is not None and not jnp.issubdtype(wire_dtype, jnp.floating):
        raise UserError(
            f"collectives: wire_dtype={np.dtype(wire_dtype)} cannot carry sums; give a "
            "floating-point dtype, such as bfloat16, or None"
        )
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    for name, leaf in zip(leaf_names(tree), leaves, strict=True):
        if leaf.dtype == jnp.bool_:
            raise UserError(f"collectives: leaf{name} is boolean; convert it to integers to sum it")
    return leaves, structure


def _refuse_summed(tree: PyTree, leaves: Sequence[jax.Array], axes: _Axes) -> None:
    """Refuse gradients that `jax.grad` has summed over `outer`, to be summed there again."""
    for name, leaf in zip(leaf_names(tree), leaves, strict=True):
        varying = varying_axes(leaf)
        equal = [axis for axis in axes.outer if axis not in varying]
        if equal and any(axis in varying for axis in axes.inner):
            raise UserError(
                f"collectives: leaf{name} differs along {', '.join(axes.inner)} but not along "
                f"{', '.join(equal)}, and would be counted once for each rank there: jax.grad sums "
                "over axes along which the weights do not vary; before it, "
                f"jax.lax.pcast(weights, {tuple(equal)}, to='varying')"
            )


def _dtypes_and_kinds(leaves: Sequence[jax.Array]) -> tuple[list[Any], list[Hashable]]:
    # Leaves of different varying axes never share a chunk: in one array they would all come to
    # vary over the axes of each.
    dtypes = [leaf.dtype for leaf in leaves]
    return dtypes, [(leaf.dtype.name, varying_axes(leaf)) for leaf in leaves]


def _cast_floating(leaf: jax.Array, dtype: Any) -> jax.Array:
    floating = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if floating else leaf


def _sum_across(x: jax.Array, axes: _Axes, wire_dtype: Any) -> jax.Array:
    """The sum over the outer axes, still in the wire dtype."""
    return lax.psum(_cast_floating(x, wire_dtype), axes.outer) if axes.outer else x


def _sum_to_shards(x: jax.Array, dim: int, axes: _Axes, wire_dtype: Any) -> jax.Array:
    dtype = x.dtype
    if x.size == 0:  # XLA has no collectives of empty arrays
        return jnp.zeros(_with_size(x, dim, x.shape[dim] // axes.ranks), dtype)
    if axes.inner:
        x = to_varying(x, axes.inner)
        x = lax.psum_scatter(x, axes.inner, scatter_dimension=dim, tiled=True)
    return _sum_across(x, axes, wire_dtype).astype(dtype)


def _all_reduce_vector(vector: jax.Array, axes: _Axes, wire_dtype: Any) -> jax.Array:
    """The sum of a vector over inner and outer, invarying."""
    dtype = vector.dtype
    if vector.size == 0:
        return jnp.zeros((0,), dtype)
    if not axes.outer:
        return lax.psum(vector, axes.inner) if axes.inner else vector
    if not axes.inner:
        return _sum_across(vector, axes, wire_dtype).astype(dtype)
    padded = jnp.pad(vector, (0, -vector.size % axes.ranks))
    shard = to_varying(padded, axes.inner)
    shard = lax.psum_scatter(shard, axes.inner, scatter_dimension=0, tiled=True)
    shard = _sum_across(shard, axes, wire_dtype)
    if shard.dtype.itemsize >= dtype.itemsize:
        shard = shard.astype(dtype)
    return _gather(shard, 0, axes, "invarying").astype(dtype)[: vector.size]


def _gather(shard: jax.Array, dim: int, axes: _Axes, to: str) -> jax.Array:
    if shard.size == 0:
        return jnp.zeros(_with_size(shard, dim, shard.shape[dim] * axes.ranks), shard.dtype)
    if not axes.inner:
        return shard
    shard = to_varying(shard, axes.inner)
    return lax.all_gather(shard, axes.inner, axis=dim, tiled=True, to=to)


def _with_size(x: jax.Array, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _take(chunk: Chunk, arrays: Mapping[int, jax.Array], axis: int) -> jax.Array:
    """The pieces of a chunk, one behind the other along `axis`."""
    pieces = [
        lax.slice_in_dim(arrays[piece.leaf], piece.start, piece.stop, axis=axis)
        for piece in chunk.pieces
    ]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=axis)


class _Parts:
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
        parts = self._parts[leaf]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=self._axis)
