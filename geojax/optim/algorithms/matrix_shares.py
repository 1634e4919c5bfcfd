"""Whole matrices out of shards, each on one rank of the site, and back.

A matrix is the last two dims of a leaf; the dims before them (layers, experts) count matrices. The
ranks that hold pieces of the same matrices divide them among themselves, round after round of
exchanges, so that none gathers or works on what another does:

    shards [M, a / n, b]  ─ all-to-all ─►  [M / n, a, b] ─ work ─►  ─ all-to-all ─►  [M, a / n, b]

A second cut, as tensor parallelism makes it, is a second round. In each round and direction a rank
sends (n - 1) / n of its shards, 1 / n of what gathering every matrix everywhere would send. Leaves
whose matrices have one shape and are cut alike share the rounds; M is rounded up to a multiple of
the ranks with zeros. Where a leaf is unsharded (ZeRO 0), nothing is sent and every rank works on
all matrices, as it does at every site: nothing crosses `dc`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.optim.leaf_groups import group, map_by_group
from geojax.sharding.leaf_layouts import DimSharding, LeafLayout

MATRIX_DIMS = 2


class MatrixGroup(NamedTuple):
    """Leaves that exchange their matrices together."""

    shape: tuple[int, ...]
    """Rows and columns of a matrix of the model."""
    part_shape: tuple[int, ...]
    """Rows and columns with the padding that they have on the devices, over all cuts."""
    cuts: tuple[DimSharding, ...]
    """The ways in which its matrices are cut, the innermost one first; their dims are negative."""

    @property
    def ranks(self) -> int:
        """The number of ranks that divide the matrices among themselves."""
        return math.prod(cut.ranks for cut in self.cuts)

    def exchanged(self, matrices: int) -> int:
        """Round the number of matrices that ranks hold pieces of up to what they can divide."""
        return -(-matrices // self.ranks) * self.ranks


def matrix_group(layout: LeafLayout) -> MatrixGroup:
    """Return the group of a leaf."""
    cuts = (layout.shard, *layout.model_shards)
    assert layout.shard is None or "dc" not in layout.shard.axes, "matrices stay inside a site"
    matrix = (len(layout.shape) - MATRIX_DIMS, len(layout.shape) - 1)
    return MatrixGroup(
        layout.shape[-MATRIX_DIMS:],
        layout.padded_shape[-MATRIX_DIMS:],
        tuple(
            DimSharding(cut.dim - len(layout.shape), cut.axes, cut.ranks)
            for cut in cuts
            if cut is not None and cut.dim in matrix and cut.ranks > 1
        ),
    )


def matrix_groups(layouts: Any) -> dict[MatrixGroup, int]:
    """Count the matrices of each group of leaves that a rank holds pieces of."""
    leaves = jax.tree.leaves(layouts)
    grouped = group(matrix_group(leaf) for leaf in leaves)
    return {
        key: sum(math.prod(leaves[index].shard_shape[:-MATRIX_DIMS]) for index in members)
        for key, members in grouped.items()
    }


def map_matrices(
    work: Callable[[jax.Array, tuple[int, ...]], jax.Array], shards: Any, layouts: Any
) -> Any:
    """Apply `work` to whole matrices; call it inside the `shard_map` that `layouts` are of.

    Args:
        work: takes [m, a, b] with the padding of the devices, and the matrices' own shape; returns
            as many of the same shape. Rows and columns of zeros must stay zeros.
        shards: a tree of this rank's shards.
        layouts: the `LeafLayout` of each.
    """

    def of_group(key: MatrixGroup, leaves: list[jax.Array], _: list[LeafLayout]) -> list[jax.Array]:
        stacks = [leaf.reshape(-1, *leaf.shape[-MATRIX_DIMS:]) for leaf in leaves]
        counts = [len(stack) for stack in stacks]
        stack = jnp.concatenate(stacks)
        missing = key.exchanged(len(stack)) - len(stack)
        stack = jnp.pad(stack, ((0, missing), (0, 0), (0, 0)))
        for cut in key.cuts:
            stack = _exchange(stack, cut, from_dim=0, to_dim=cut.dim)
        stack = work(stack, key.shape)
        for cut in reversed(key.cuts):
            stack = _exchange(stack, cut, from_dim=cut.dim, to_dim=0)
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return [
            stack[start : start + count].reshape(leaf.shape)
            for start, count, leaf in zip(starts, counts, leaves, strict=True)
        ]

    return map_by_group(of_group, shards, layouts, matrix_group)


def _exchange(stack: jax.Array, cut: DimSharding, *, from_dim: int, to_dim: int) -> jax.Array:
    """Cut `from_dim` over the ranks of a cut, and join `to_dim`, in their order."""
    dims = [dim % stack.ndim for dim in (from_dim, to_dim)]
    return lax.all_to_all(stack, cut.axes, dims[0], dims[1], tiled=True)
