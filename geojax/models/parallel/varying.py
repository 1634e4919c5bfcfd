"""Varying-axes types of trees of arrays inside a `shard_map`.

Scans and custom derivatives insist that types match, varying axes included. Outside a `shard_map`
nothing varies and everything here does nothing.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from geojax.collectives import axes as mesh_axes
from geojax.collectives import barrier

Tree = TypeVar("Tree")


def varying_axes(*trees: object) -> frozenset[str]:
    """Return every mesh axis that some array in `trees` varies over."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(mesh_axes.varying_axes(leaf) for leaf in leaves))


def vary_over(tree: Tree, axes: frozenset[str]) -> Tree:
    """Make every array of `tree` vary over `axes` at least (backward, this sums over them)."""
    return jax.tree.map(lambda leaf: mesh_axes.to_varying(leaf, sorted(axes)), tree)


def typed_like(x: jax.Array, typed: Any) -> jax.Array:
    """Type `x` as varying over whatever `typed` varies over, which is no less."""
    more = varying_axes(x) - varying_axes(typed)
    assert not more, f"varies over {sorted(more)} too"
    return vary_over(x, varying_axes(typed))


def zeros_of(tree: Any, *leading: int, dtype: Any = None, zero: jax.Array | float = 0.0) -> Any:
    """Make zeros in the shapes and varying axes of the arrays (or shapes) of `tree`.

    Args:
        tree: the arrays.
        leading: dims that come before theirs.
        dtype: dtype of the zeros; None: that of each array.
        zero: that of `zero_after`, which says when they are made.
    """

    def zeros(leaf: jax.Array) -> jax.Array:
        array = jnp.full((*leading, *leaf.shape), zero, dtype or leaf.dtype)
        return vary_over(array, varying_axes(leaf))

    return jax.tree.map(zeros, tree)


def zero_after(tree: Tree) -> tuple[Tree, jax.Array]:
    """Return `tree` and a zero that is known when all of `tree` has been computed.

    A large buffer that a loop fills should be made of such a zero. XLA for GPUs makes a constant
    buffer when the program begins, and makes one buffer for all equal constants. If anything else
    reads zeros of that shape, a loop gets a copy, and the original is held until then.
    """
    return barrier((tree, jnp.zeros(())))
