"""Trees to the buckets that collectives send, and back: of sums over sites, and of an all-gather.

`FlatBuckets` are those of an all-reduce: leaves flattened into vectors, of each of which a rank
sums its share. `BlockBuckets` are those of a reduce-scatter: columns of the blocks that the ranks
keep. Making buckets includes the phase inside the site, which nothing between sites waits for.
`all_gather` is the way back: whole leaves from the blocks that the ranks of a site hold.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import AxisNames, SiteAxes, collective_scope, to_varying, varying_axes
from geojax.collectives.buckets import (
    BlockLayout,
    BucketPlan,
    Collected,
    block_layouts,
    check_shards,
    plan_columns,
    plan_elements,
    share_length,
)
from geojax.collectives.exchange import SITE_STREAM, SumWithError, on_own_stream
from geojax.collectives.like_trees import (
    PyTree,
    leaf_names,
    spread_dims,
    spread_errors,
    spread_shapes,
)
from geojax.errors import UserError


class SummedTree(NamedTuple):
    """A summed tree, and the error feedback for the next sum."""

    total: Any
    errors: Any
    """None: none is kept."""


@dataclass(frozen=True)
class FlatBuckets:
    """The layout of an all-reduced tree in its buckets."""

    plan: BucketPlan
    shapes: tuple[tuple[int, ...], ...]
    structure: Any
    axes: SiteAxes

    def join(self, sums: Sequence[SumWithError]) -> SummedTree:
        """Gather the buckets' sums inside the site, and take the tree out of them."""
        totals = Collected(len(self.shapes), dim=0)
        errors = Collected(len(self.shapes), dim=0)
        keep = False
        for bucket, made in zip(self.plan.buckets, sums, strict=True):
            totals.put(bucket, self._gather(made.total, bucket.length))
            if made.error is not None:
                errors.put(bucket, self._gather(made.error, bucket.length))
                keep = True
        return SummedTree(self._tree(totals), self._tree(errors) if keep else None)

    def _gather(self, share: jax.Array, size: int) -> jax.Array:
        if not self.axes.inter:  # not scattered: one psum inside the site
            return share
        return gather_blocks(share, 0, self.axes, "invarying")[:size]

    def _tree(self, collected: Collected) -> Any:
        joined = [collected.join(leaf).reshape(shape) for leaf, shape in enumerate(self.shapes)]
        return jax.tree.unflatten(self.structure, joined)


def flat_buckets(
    tree: PyTree,
    errors: PyTree | None,
    axes: SiteAxes,
    bucket_bytes: int | None,
    block: int,
    *,
    own_stream: bool = False,
) -> tuple[FlatBuckets, list[jax.Array]]:
    """Plan an all-reduce; return also this rank's share of each bucket, summed inside the site.

    The errors of the step before count once a site. `block` is that of the wire format. With
    `own_stream` the sums are on `SITE_STREAM`.
    """
    leaves, structure = _summands(tree)
    shapes = tuple(leaf.shape for leaf in leaves)
    vectors = [axes.drop_singles(leaf).reshape(leaf.size) for leaf in leaves]
    if errors is not None:
        vectors = [
            vector + axes.on_first_rank(axes.drop_singles(error).reshape(error.size))
            for vector, error in zip(vectors, spread_errors(errors, tree, shapes), strict=True)
        ]
    plan = plan_elements(
        [vector.size for vector in vectors],
        *dtypes_and_kinds(vectors),
        axes.ranks,
        bucket_bytes,
        block,
    )
    by_leaf = dict(enumerate(vectors))

    stream = SITE_STREAM if own_stream else None

    def share(vector: jax.Array) -> jax.Array:
        if not vector.size:
            return jnp.zeros((0,), vector.dtype)
        if not axes.intra:
            return vector
        if not axes.inter:
            with collective_scope("psum", axes.intra):
                return on_own_stream(lax.psum(vector, axes.intra), stream)
        whole = axes.ranks * share_length(vector.size, axes.ranks, block)
        padded = jnp.pad(vector, (0, whole - vector.size))
        return on_own_stream(scatter(padded, 0, axes), stream)

    layout = FlatBuckets(plan, shapes, structure, axes)
    shares = [share(bucket.pad(bucket.take(by_leaf, dim=0), 0)) for bucket in plan.buckets]
    return layout, shares


@dataclass(frozen=True)
class BlockBuckets:
    """The layout of the blocks of a reduce-scattered tree in its buckets."""

    plan: BucketPlan
    layouts: tuple[BlockLayout, ...]
    structure: Any
    axes: SiteAxes

    def join(self, sums: Sequence[SumWithError]) -> SummedTree:
        """Take the tree of blocks out of the buckets' sums."""
        keep = any(made.error is not None for made in sums)
        return SummedTree(
            self._tree([made.total for made in sums]),
            self._tree([made.error for made in sums if made.error is not None]) if keep else None,
        )

    def _tree(self, arrays: Sequence[jax.Array]) -> Any:
        unmerged = self.plan.unmerged
        collected = Collected(len(self.layouts), dim=0)
        blocks: dict[int, jax.Array] = {}
        for bucket, array in zip(self.plan.buckets, arrays, strict=True):
            leaf = bucket.pieces[0].leaf
            if leaf in unmerged:
                blocks[leaf] = array
            else:
                collected.put(bucket, array.reshape(bucket.length))
        for leaf, layout in enumerate(self.layouts):
            if leaf not in unmerged:
                blocks[leaf] = layout.from_row(collected.join(leaf))
        ordered = [
            to_varying(blocks[leaf], self.axes.all_intra) for leaf in range(len(self.layouts))
        ]
        return jax.tree.unflatten(self.structure, ordered)


def block_buckets(
    tree: PyTree,
    errors: PyTree | None,
    dims: PyTree,
    axes: SiteAxes,
    bucket_bytes: int | None,
    block: int,
    *,
    own_stream: bool = False,
) -> tuple[BlockBuckets, list[jax.Array]]:
    """Plan a reduce-scatter; return also this rank's block of each bucket, summed inside the site.

    A leaf that is a bucket by itself is sent as it lies. The errors of the step before are added.
    `block` is that of the wire format. With `own_stream` the sums are on `SITE_STREAM`.
    """

    def scattered(x: jax.Array, dim: int) -> jax.Array:
        made = scatter(x, dim, axes)
        return on_own_stream(made, SITE_STREAM if own_stream else None)

    leaves, structure = _summands(tree)
    _refuse_summed(tree, leaves, axes)
    leaves = [axes.drop_singles(leaf) for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    layouts = block_layouts(leaf_names(tree), shapes, spread_dims(dims, tree), axes.ranks)
    plan = plan_columns(layouts, *dtypes_and_kinds(leaves), bucket_bytes, block)
    unmerged = plan.unmerged
    merged = [leaf for leaf in range(len(leaves)) if leaf not in unmerged]
    rows = {leaf: layouts[leaf].to_rows(leaves[leaf]) for leaf in merged}
    given: Mapping[int, jax.Array] = {}
    if errors is not None:
        kept = spread_errors(errors, tree, [layout.shard_shape for layout in layouts])
        given = dict(enumerate(map(axes.drop_singles, kept)))
    error_rows = {leaf: layouts[leaf].to_row(given[leaf]) for leaf in merged if given}
    blocks = []
    for bucket in plan.buckets:
        leaf = bucket.pieces[0].leaf
        if leaf in unmerged:
            own = scattered(layouts[leaf].pad(leaves[leaf]), layouts[leaf].dim)
            error = given.get(leaf)
        else:
            own = bucket.pad(scattered(bucket.take(rows, dim=1), 0), 1)
            error = bucket.pad(bucket.take(error_rows, dim=0)[None], 1) if given else None
        blocks.append(own if error is None else own + error)
    return BlockBuckets(plan, layouts, structure, axes), blocks


def scatter(x: jax.Array, dim: int, axes: SiteAxes) -> jax.Array:
    """Sum `x`, whose `dim` divides by the ranks, inside the site; each rank keeps its block.

    The blocks are sent one behind the other. XLA for GPUs and CPUs scatters along the major dim of
    the layout alone: for another dim it would choose another layout, also for what the result is
    added to, and hold that once more in the usual layout.
    """
    block = x.shape[dim] // axes.ranks
    if x.size == 0:  # XLA has no collectives of empty arrays
        return jnp.zeros(_with_size(x, dim, block), x.dtype)
    if not axes.intra:
        return x
    if dim > 0:
        parts = x.reshape(*x.shape[:dim], axes.ranks, block, *x.shape[dim + 1 :])
        x = jnp.moveaxis(parts, dim, 0)
    x = to_varying(x, axes.intra)
    with collective_scope("psum_scatter", axes.intra):
        return lax.psum_scatter(x, axes.intra, scatter_dimension=0, tiled=dim == 0)


def gather_blocks(
    block: jax.Array, dim: int, axes: SiteAxes, to: str, stream: str | None = None
) -> jax.Array:
    """Concatenate the blocks of all ranks of a site along `dim`; `stream` as `on_own_stream`."""
    if block.size == 0:
        return jnp.zeros(_with_size(block, dim, block.shape[dim] * axes.ranks), block.dtype)
    if not axes.intra:
        return block
    block = to_varying(block, axes.intra)
    with collective_scope("all_gather", axes.intra):
        made = lax.all_gather(block, axes.intra, axis=dim, tiled=True, to=to)
        return on_own_stream(made, stream)


def dtypes_and_kinds(leaves: Sequence[jax.Array]) -> tuple[list[Any], list[Hashable]]:
    """Return the dtype of each leaf, and what leaves of one bucket must have in common.

    That is the dtype and the varying axes: in one array leaves would all come to vary over the
    axes of each.
    """
    dtypes = [leaf.dtype for leaf in leaves]
    return dtypes, [(leaf.dtype.name, varying_axes(leaf)) for leaf in leaves]


def _with_size(x: jax.Array, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


def _summands(tree: PyTree) -> tuple[list[jax.Array], Any]:
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    for name, leaf in zip(leaf_names(tree), leaves, strict=True):
        if leaf.dtype == jnp.bool_:
            raise UserError(f"collectives: leaf{name} is boolean; convert it to integers to sum it")
    return leaves, structure


def _refuse_summed(tree: PyTree, leaves: Sequence[jax.Array], axes: SiteAxes) -> None:
    """Refuse gradients that `jax.grad` has summed over `inter`, to be summed there again."""
    for name, leaf in zip(leaf_names(tree), leaves, strict=True):
        varying = varying_axes(leaf)
        equal = [axis for axis in axes.inter if axis not in varying]
        if equal and any(axis in varying for axis in axes.intra):
            raise UserError(
                f"collectives: leaf{name} differs along {', '.join(axes.intra)} but not along "
                f"{', '.join(equal)}, and would be counted once for each rank there. jax.grad sums "
                "over axes along which the weights do not vary; before it, call "
                f"jax.lax.pcast(weights, {tuple(equal)}, to='varying')"
            )


Tree = TypeVar("Tree")


def all_gather(
    shards: Tree,
    intra: AxisNames,
    *,
    dims: PyTree,
    shapes: PyTree,
    bucket_bytes: int | None = None,
    dtype: Any = None,
    to: Literal["varying", "invarying"] = "varying",
    own_stream: bool = False,
) -> Tree:
    """Gather whole leaves from the shards of the ranks of `intra`; padding is trimmed.

    The inverse of the scattering in `reduce_scatter`.

    Args:
        shards: arrays [.., block, ..], rank r holding the entries from r * block on, in any
            registered tree: dicts, `nnx.State`, dataclasses.
        intra: the axes over whose ranks the leaves are scattered.
        dims: the dimension along which each leaf is scattered: one int for all, or a tree.
        shapes: the shapes of the whole leaves: a tree like the shards, of tuples or of things with
            a `.shape`. The tree of whole leaves itself would do.
        bucket_bytes: the most bytes of one message (see `geojax.collectives.reduction`).
        dtype: floating-point shards are cast to it before they are sent, and stay so: bfloat16
            weights from float32 masters cost half. The derivative then sums cotangents in it.
        to: the type of the result. "varying": over all of `intra`, as `lax.all_gather` returns. The
            derivative with respect to a whole leaf is then each rank's own part, and the gather's
            transpose, a psum_scatter, sums these parts. "invarying": all ranks are known to hold
            equal leaves (`out_specs=P()` is accepted), and differentiating with respect to them
            sums.
        own_stream: on GPUs the messages travel beside other collectives of the program.

    Returns:
        The whole leaves. Over axes other than `intra` they vary as the shards did.

    Raises:
        UserError: an unknown axis, `dims` or `shapes` that do not fit, or buckets that cannot hold
            an element for each rank.

    Example:
        >>> mesh = geojax.make_mesh(dc=2, data=4)
        >>> def step(shard):  # [2], the last one padded with a zero
        ...     return all_gather(shard, "data", dims=0, shapes=(7,), to="invarying")
        >>> program = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> jax.jit(program)(jnp.array([1, 2, 3, 4, 5, 6, 7, 0])).tolist()
        [1, 2, 3, 4, 5, 6, 7]
    """
    axes = SiteAxes.resolve(intra, ())
    if to not in ("varying", "invarying"):
        raise UserError(f"collectives: all_gather to={to!r}; known are 'varying' and 'invarying'")
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, shards))
    leaves = [axes.drop_singles(_cast_floating(leaf, dtype)) for leaf in leaves]
    names = leaf_names(shards)
    layouts = block_layouts(
        names, spread_shapes(shapes, shards), spread_dims(dims, shards), axes.ranks
    )
    check_shards(names, [leaf.shape for leaf in leaves], layouts)
    plan = plan_columns(layouts, *dtypes_and_kinds(leaves), bucket_bytes)
    unmerged = plan.unmerged
    rows = {
        leaf: layout.to_row(leaves[leaf])
        for leaf, layout in enumerate(layouts)
        if leaf not in unmerged
    }
    stream = SITE_STREAM if own_stream else None
    gathered: dict[int, jax.Array] = {}
    collected = Collected(len(leaves), dim=1)
    for bucket in plan.buckets:
        leaf = bucket.pieces[0].leaf
        if leaf in unmerged:
            whole = gather_blocks(leaves[leaf], layouts[leaf].dim, axes, to, stream)
            gathered[leaf] = layouts[leaf].trim(whole)
        else:
            row = bucket.take(rows, dim=0)
            collected.put(bucket, gather_blocks(row[None], 0, axes, to, stream))
    for leaf in rows:
        gathered[leaf] = layouts[leaf].from_rows(collected.join(leaf))
    kept = axes.all_intra if to == "varying" else ()
    return jax.tree.unflatten(
        structure, [to_varying(gathered[i], kept) for i in range(len(leaves))]
    )


def _cast_floating(leaf: jax.Array, dtype: Any) -> jax.Array:
    floating = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if floating else leaf
