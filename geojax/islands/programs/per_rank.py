"""Values of which every rank of a mesh has its own, handed from one compiled program to the next.

Inside a `shard_map` a value varies over some of the mesh's axes and is equal along the others.
Outside, it is an array with a leading dim of ranks, and its type is kept beside it: the next
program gets the value back with the type that it had, and no data moves.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from geojax.collectives.axes import agreed, to_varying, varying_axes
from geojax.mesh import AXES

RANKS = PartitionSpec(AXES)
"""The sharding of a `PerRank`'s array."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["varying"])
@dataclasses.dataclass(frozen=True)
class PerRank:
    """One value of every rank."""

    array: Any
    """[ranks, ...]; inside a `shard_map`, and before `unpack`, [1, ...]."""
    varying: tuple[str, ...]
    """The axes that the value varies over."""


def is_shared(tree: Any, mesh: Mesh) -> bool:
    """Return True if several ranks of `mesh` hold the same value of some `PerRank` of `tree`."""
    values = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, PerRank))
    return any(
        size > 1 and axis not in value.varying
        for value in values
        for axis, size in mesh.shape.items()
    )


def pack(tree: Any) -> Any:
    """Return the arrays of `tree` as `PerRank`s; call it inside a `shard_map`."""

    def one(value: jax.Array) -> PerRank:
        varying = tuple(axis for axis in AXES if axis in varying_axes(value))
        return PerRank(to_varying(value, AXES)[None], varying)

    return jax.tree.map(one, tree)


def unpack(tree: Any) -> Any:
    """Invert `pack`; call it inside a `shard_map` too."""

    def one(value: PerRank) -> jax.Array:
        return agreed(value.array[0], [axis for axis in AXES if axis not in value.varying])

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, PerRank))


def on_packed(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `function` of a tree as one of `PerRank`s."""

    @functools.wraps(function)
    def packed(tree: Any) -> Any:
        return pack(function(unpack(tree)))

    return packed
