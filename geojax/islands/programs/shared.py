"""Values that several ranks of a site hold, divided among these to cross a link once.

    rank 0   [a b c d]  ─ divide ─►  [a b]  ─ link, addition ─►  [A B]  ─ whole ─►  [A B C D]
    rank 1   [a b c d]               [c d]                       [C D]              [A B C D]

Ranks share gradients of leaves that nothing shards (ZeRO 0, norms under `tensor`), shards under
`context`, and the stream between chunks under `tensor` without sequence parallelism.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import axis_sizes, varying_axes
from geojax.mesh import AXES


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["numbers"], meta_fields=["shape", "axes"]
)
@dataclasses.dataclass(frozen=True)
class Share:
    """A rank's part of a value that others of its site hold too."""

    numbers: Any
    """[length]; zeros follow the value's last number."""
    shape: tuple[int, ...]
    """The shape of the value."""
    axes: tuple[str, ...]
    """The axes whose ranks hold the value, each longer than 1."""


def is_divided(tree: Any) -> bool:
    """Return True if some value of `tree` is a `Share`."""
    values = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Share))
    return any(isinstance(value, Share) for value in values)


def divide(tree: Any) -> Any:
    """Divide each array among the ranks that it does not vary over, inside a `shard_map`.

    An array that each rank has for itself stays as it is; the others become a `Share`.
    """

    def one(value: jax.Array) -> jax.Array | Share:
        equal = axis_sizes(axis for axis in AXES if axis not in varying_axes(value))
        axes = tuple(axis for axis, size in equal.items() if size > 1)
        if not axes:
            return value
        ranks = math.prod(equal.values())
        padded = jnp.pad(value.ravel(), (0, -value.size % ranks))
        own = lax.dynamic_index_in_dim(
            padded.reshape(ranks, -1), lax.axis_index(axes), keepdims=False
        )
        return Share(own, value.shape, axes)

    return jax.tree.map(one, tree)


def whole(tree: Any) -> Any:
    """Invert `divide`: gather each `Share` in the site, inside a `shard_map`."""

    def one(value: jax.Array | Share) -> jax.Array:
        if not isinstance(value, Share):
            return value
        numbers = lax.all_gather(value.numbers, value.axes, tiled=True, to="invarying")
        return numbers[: math.prod(value.shape)].reshape(value.shape)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Share))
