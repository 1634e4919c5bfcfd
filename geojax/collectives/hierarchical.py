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
same varying axes (`geojax.collectives.buckets`). Chunks do not depend on one another, so the
in-site phase of one may run beside the cross-site phases of others; the flags of `geojax.runtime`
keep XLA for GPUs from merging them again. None: every leaf is one chunk, sent as it lies, without a
copy unless it needs padding.

Wire formats. `wire` is how floating-point numbers cross `outer` (`geojax.collectives.exchange`)
instead of in a `psum` in the leaf's dtype: in fewer bytes. Inside a site numbers are always sent in
the leaf's dtype. What rounding took away from this time's sums can be added to the next:
`all_reduce_with_errors` and `reduce_scatter_with_errors`.

Derivatives are those of the plain `psum` of the same values: linear.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from geojax.collectives.axes import AxisNames, to_varying, varying_axes
from geojax.collectives.block_layout import (
    PyTree,
    block_layouts,
    check_shards,
    leaf_names,
    plan_columns,
    plan_elements,
    spread_dims,
    spread_shapes,
)
from geojax.collectives.buckets import ChunkPlan
from geojax.collectives.exchange import Sum
from geojax.collectives.phases import (
    Axes,
    all_reduce_vector,
    gather_shards,
    resolve,
    sum_to_shards,
)
from geojax.collectives.pieces import Parts, take
from geojax.collectives.wire_format import Wire
from geojax.errors import UserError

Tree = TypeVar("Tree")


def hierarchical_all_reduce(
    tree: Tree,
    inner: AxisNames,
    outer: AxisNames,
    *,
    chunk_bytes: int | None = None,
    wire: Wire | None = None,
) -> Tree:
    """The sum of `tree` over all ranks of `inner` and `outer`, the same on each of them.

    Args:
        tree: arrays of any shape, scalars among them; a chunk is padded where it does not divide.
        inner: the axes inside a site.
        outer: the axes between sites. Without any longer than 1, the sum is one psum over `inner`.
        chunk_bytes: the most bytes of one in-site message (see the module).
        wire: the format in which numbers cross `outer`; None, as they are (see the module).

    Returns:
        Like `tree`, in the leaves' shapes and dtypes. Varying over neither `inner` nor `outer`, so
        that `out_specs=P()` is accepted; over other axes as the leaf was.

    Raises:
        UserError: an unknown axis or one named twice, a boolean leaf, or chunks that cannot hold an
            element for each rank.
    """
    summed, _ = all_reduce_with_errors(tree, None, inner, outer, chunk_bytes=chunk_bytes, wire=wire)
    return summed


def all_reduce_with_errors(
    tree: Tree,
    errors: Tree | None,
    inner: AxisNames,
    outer: AxisNames,
    *,
    chunk_bytes: int | None = None,
    wire: Wire | None = None,
) -> tuple[Tree, Tree | None]:
    """`hierarchical_all_reduce` with error feedback (`geojax.collectives.exchange`).

    Args:
        tree: as there.
        errors: those of the time before, like `tree`, equal on all ranks of `inner`; zeros at
            first. None: none are kept.
        inner: as there.
        outer: as there.
        chunk_bytes: as there.
        wire: as there.

    Returns:
        The sums; and the errors of this time, which vary over `outer` and not over `inner`. They
        are zero where nothing was rounded.
    """
    axes = resolve(inner, outer)
    flat, vectors = flatten(tree, errors, axes, chunk_bytes)
    keep = errors is not None
    return flat.join([all_reduce_vector(vector, axes, wire, keep_error=keep) for vector in vectors])


def hierarchical_reduce_scatter(
    tree: Tree,
    inner: AxisNames,
    outer: AxisNames,
    *,
    dims: PyTree,
    chunk_bytes: int | None = None,
    wire: Wire | None = None,
) -> Tree:
    """The sum of `tree` over `inner` and `outer`, of which each rank of `inner` keeps its block.

    Args:
        tree: arrays of one dimension or more.
        inner: the axes inside a site, over whose ranks the result is scattered.
        outer: the axes between sites; every site ends with the same shards.
        dims: the dimension along which each leaf is scattered: one int for all, or a tree.
        chunk_bytes: the most bytes of one in-site message (see the module).
        wire: the format in which numbers cross `outer`; None, as they are (see the module).

    Returns:
        The shards: a leaf [.., size, ..] becomes [.., block, ..] with block = ceil(size / ranks).
        Rank r holds the entries from r * block on, and zeros past the end of the leaf. Varying over
        `inner` (its axes of size 1 too) and not over `outer`; over other axes as the leaf was.

    Raises:
        UserError: as `hierarchical_all_reduce`; or a scalar leaf, `dims` that do not fit, or a leaf
            that differs along `inner` and not along `outer`: a gradient summed there already.
    """
    summed, _ = reduce_scatter_with_errors(
        tree, None, inner, outer, dims=dims, chunk_bytes=chunk_bytes, wire=wire
    )
    return summed


def reduce_scatter_with_errors(
    tree: Tree,
    errors: Tree | None,
    inner: AxisNames,
    outer: AxisNames,
    *,
    dims: PyTree,
    chunk_bytes: int | None = None,
    wire: Wire | None = None,
) -> tuple[Tree, Tree | None]:
    """`hierarchical_reduce_scatter` with error feedback (`geojax.collectives.exchange`).

    Args:
        tree: as there.
        errors: those of the time before, like the shards; zeros at first. None: none are kept.
        inner: as there.
        outer: as there.
        dims: as there.
        chunk_bytes: as there.
        wire: as there.

    Returns:
        The shards; and the errors of this time, which vary over `outer` too. They are zero where
        nothing was rounded.
    """
    axes = resolve(inner, outer)
    leaves, structure = _summands(tree)
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
    before: dict[int, jax.Array] = {}
    if errors is not None:
        before = dict(enumerate(map(axes.drop_singles, jax.tree.leaves(errors))))
    before_rows = {leaf: layouts[leaf].to_row(before[leaf]) for leaf in rows if before}
    sums, rounded = Parts(len(leaves), axis=0), Parts(len(leaves), axis=0)
    shards: dict[int, jax.Array] = {}
    after: dict[int, jax.Array] = {}
    for chunk in plan.chunks:
        leaf = chunk.pieces[0].leaf
        if leaf in alone:
            layout = layouts[leaf]
            padded = layout.pad(leaves[leaf])
            made = sum_to_shards(padded, before.get(leaf), layout.dim, axes, wire)
            shards[leaf] = made.total
            if made.error is not None:
                after[leaf] = made.error
        else:
            error = take(chunk, before_rows, axis=0)[None] if before else None
            made = sum_to_shards(take(chunk, rows, axis=1), error, 0, axes, wire)
            sums.put(chunk, made.total.reshape(chunk.length))
            if made.error is not None:
                rounded.put(chunk, made.error.reshape(chunk.length))
    for leaf in rows:
        shards[leaf] = layouts[leaf].from_row(sums.join(leaf))
        if before:
            after[leaf] = layouts[leaf].from_row(rounded.join(leaf))

    def tree_of(made: Mapping[int, jax.Array]) -> Any:
        ordered = [to_varying(made[leaf], axes.all_inner) for leaf in range(len(leaves))]
        return jax.tree.unflatten(structure, ordered)

    return tree_of(shards), None if errors is None else tree_of(after)


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
    axes = resolve(inner, ())
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
    parts = Parts(len(leaves), axis=1)
    for chunk in plan.chunks:
        leaf = chunk.pieces[0].leaf
        if leaf in alone:
            whole = gather_shards(leaves[leaf], layouts[leaf].dim, axes, to)
            wholes[leaf] = layouts[leaf].trim(whole)
        else:
            row = take(chunk, rows, axis=0)
            parts.put(chunk, gather_shards(row[None], 0, axes, to))
    for leaf in rows:
        wholes[leaf] = layouts[leaf].from_rows(parts.join(leaf))
    kept = axes.all_inner if to == "varying" else ()
    return jax.tree.unflatten(structure, [to_varying(wholes[i], kept) for i in range(len(leaves))])


@dataclass(frozen=True)
class FlatTree:
    """How the leaves of a tree lie in the vectors that an all-reduce sends, one for each chunk."""

    plan: ChunkPlan
    shapes: tuple[tuple[int, ...], ...]
    structure: Any

    def join(self, sums: Sequence[Sum]) -> tuple[Any, Any]:
        """The tree of the sums of all chunks, and that of their errors, None if there are none."""
        totals, errors = Parts(len(self.shapes), axis=0), Parts(len(self.shapes), axis=0)
        keep = False
        for chunk, made in zip(self.plan.chunks, sums, strict=True):
            totals.put(chunk, made.total)
            if made.error is not None:
                errors.put(chunk, made.error)
                keep = True
        return self._tree(totals), self._tree(errors) if keep else None

    def _tree(self, parts: Parts) -> Any:
        joined = [parts.join(leaf).reshape(shape) for leaf, shape in enumerate(self.shapes)]
        return jax.tree.unflatten(self.structure, joined)


def flatten(
    tree: PyTree, errors: PyTree | None, axes: Axes, chunk_bytes: int | None
) -> tuple[FlatTree, list[jax.Array]]:
    """The vectors that an all-reduce of `tree` sends, with the errors of the time before added."""
    leaves, structure = _summands(tree)
    vectors = [axes.drop_singles(leaf).reshape(leaf.size) for leaf in leaves]
    if errors is not None:
        vectors = [
            vector + axes.on_first_rank(axes.drop_singles(error).reshape(error.size))
            for vector, error in zip(vectors, jax.tree.leaves(errors), strict=True)
        ]
    plan = plan_elements(
        [vector.size for vector in vectors], *_dtypes_and_kinds(vectors), axes.ranks, chunk_bytes
    )
    by_leaf = dict(enumerate(vectors))
    flat = FlatTree(plan, tuple(leaf.shape for leaf in leaves), structure)
    return flat, [take(chunk, by_leaf, axis=0) for chunk in plan.chunks]


def _summands(tree: PyTree) -> tuple[list[jax.Array], Any]:
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    for name, leaf in zip(leaf_names(tree), leaves, strict=True):
        if leaf.dtype == jnp.bool_:
            raise UserError(f"collectives: leaf{name} is boolean; convert it to integers to sum it")
    return leaves, structure


def _refuse_summed(tree: PyTree, leaves: Sequence[jax.Array], axes: Axes) -> None:
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
