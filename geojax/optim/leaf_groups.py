"""Leaves that are sharded alike, gathered and reduced together.

A collective over several leaves can put them into common buckets where they are sharded over the
same axes; here leaves are grouped by that, or by any other key of their layouts.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax

from geojax.precision import is_quantized_weight
from geojax.sharding.leaf_layouts import LeafLayout

Key = TypeVar("Key", bound=Hashable)


def shard_dim(layout: LeafLayout) -> int:
    """Return the dimension along which a leaf is sharded."""
    assert layout.shard is not None, "the leaf must be sharded"
    return layout.shard.dim


def shard_axes(layout: LeafLayout) -> tuple[tuple[str, ...] | None, bool]:
    """Return the axes inside a site that shard a leaf, None if none; and whether `dc` does."""
    if layout.shard is None:
        return None, False
    return tuple(axis for axis in layout.shard.axes if axis != "dc"), "dc" in layout.shard.axes


def map_by_group(
    function: Callable[[Any, list[Any], list[LeafLayout]], list[Any]],
    tree: Any,
    layouts: Any,
    key_of: Callable[[LeafLayout], Hashable],
) -> Any:
    """Apply `function` to all leaves with the same key together, so that they can share buckets."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantized_weight)
    leaf_layouts = jax.tree.leaves(layouts)
    results: dict[int, Any] = {}
    for key, positions in group(key_of(layout) for layout in leaf_layouts).items():
        made = function(key, [leaves[i] for i in positions], [leaf_layouts[i] for i in positions])
        results.update(zip(positions, made, strict=True))
    return jax.tree.unflatten(structure, [results[index] for index in range(len(leaves))])


def largest_group(keys: Iterable[Hashable], layouts: Sequence[LeafLayout]) -> list[int]:
    """Return the positions of the leaves of one key, the one with the most numbers.

    `keys` and `layouts` are of the same leaves; a leaf whose key is None is in no group.
    """
    groups = group(keys)
    groups.pop(None, None)
    sizes = [math.prod(layout.gathered_shape) for layout in layouts]
    return max(groups.values(), key=lambda members: sum(sizes[i] for i in members), default=[])


def group(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Return the positions of equal keys, by key."""
    groups: dict[Key, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return groups
