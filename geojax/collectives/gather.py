"""Whole leaves from the shards that the ranks of a site hold."""

from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from geojax.collectives.axes import AxisNames, SiteAxes, to_varying
from geojax.collectives.block_layout import (
    block_layouts,
    check_shards,
    plan_columns,
)
from geojax.collectives.buckets import Collected
from geojax.collectives.like_trees import PyTree, leaf_names, spread_dims, spread_shapes
from geojax.collectives.tree_buckets import dtypes_and_kinds, gather_blocks
from geojax.errors import UserError

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
    gathered: dict[int, jax.Array] = {}
    collected = Collected(len(leaves), dim=1)
    for bucket in plan.buckets:
        leaf = bucket.pieces[0].leaf
        if leaf in unmerged:
            whole = gather_blocks(leaves[leaf], layouts[leaf].dim, axes, to)
            gathered[leaf] = layouts[leaf].trim(whole)
        else:
            row = bucket.take(rows, dim=0)
            collected.put(bucket, gather_blocks(row[None], 0, axes, to))
    for leaf in rows:
        gathered[leaf] = layouts[leaf].from_rows(collected.join(leaf))
    kept = axes.all_intra if to == "varying" else ()
    return jax.tree.unflatten(
        structure, [to_varying(gathered[i], kept) for i in range(len(leaves))]
    )


def _cast_floating(leaf: jax.Array, dtype: Any) -> jax.Array:
    floating = dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(dtype) if floating else leaf
