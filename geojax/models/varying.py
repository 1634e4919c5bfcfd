"""Which mesh axes a value varies over inside a `shard_map`, and how to make two values agree.

Scans and custom derivatives insist that types match, varying axes included. Outside a `shard_map`
nothing varies and everything here does nothing.
"""

from typing import TypeVar

import jax
from jax import lax

Tree = TypeVar("Tree")


def varying_axes(*trees: object) -> frozenset[str]:
    """Every mesh axis that some array in `trees` varies over."""
    leaves = jax.tree.leaves(trees)
    return frozenset().union(*(jax.typeof(leaf).mat.varying for leaf in leaves))


def vary_over(tree: Tree, axes: frozenset[str]) -> Tree:
    """`tree` with every array varying over `axes` at least (backwards, this sums over them)."""

    def widen(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(leaf).mat.varying))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(widen, tree)
