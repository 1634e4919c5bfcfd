"""Where each leaf of the training state lives: sharded inside a site, whole in a checkpoint.

A leaf is cut along one of its dimensions into as many blocks as there are ranks on the shard axes,
and padded at the end of that dimension where it does not divide. The padding exists only on the
devices: `trim` removes it before a save and `pad` puts it back after a restore, so a checkpoint
holds the model's own shapes and restores onto any other mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHARD_AXES = ("data", "expert")
"""The axes inside a site over which the training state is sharded (ZeRO); never `dc`."""


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """One leaf: its whole shape and the dimension that is cut, or None for a replicated leaf."""

    shape: tuple[int, ...]
    dtype: Any
    dim: int | None
    ranks: int

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape with the cut dimension rounded up to a multiple of the ranks."""
        if self.dim is None:
            return self.shape
        padded = -(-self.shape[self.dim] // self.ranks) * self.ranks
        return (*self.shape[: self.dim], padded, *self.shape[self.dim + 1 :])

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what one device holds."""
        shape = list(self.padded_shape)
        if self.dim is not None:
            shape[self.dim] //= self.ranks
        return tuple(shape)

    def spec(self, axes: Sequence[str] = SHARD_AXES) -> PartitionSpec:
        """The partition spec of the padded leaf."""
        if self.dim is None:
            return PartitionSpec()
        return PartitionSpec(*[None] * self.dim, tuple(axes))

    def pad(self, leaf: jax.Array) -> jax.Array:
        """The whole leaf with zeros appended along the cut dimension."""
        missing = [(0, p - s) for p, s in zip(self.padded_shape, self.shape, strict=True)]
        return jnp.pad(leaf, missing) if self.padded_shape != self.shape else leaf

    def trim(self, leaf: jax.Array) -> jax.Array:
        """The padded leaf without its padding."""
        if self.padded_shape == self.shape:
            return leaf
        return leaf[tuple(slice(size) for size in self.shape)]


def leaf_layout(shape: tuple[int, ...], dtype: Any, ranks: int, *, stacked: bool) -> LeafLayout:
    """The layout of a leaf of `shape` over `ranks` shards.

    The largest dimension that divides is cut; where none divides, the largest of all, which wastes
    least. The leading dimension of a `stacked` leaf counts layers and is never cut, so that one
    layer's weights can be gathered without the others'.
    """
    candidates = list(range(1 if stacked else 0, len(shape)))
    assert candidates, f"a leaf of shape {shape} has no dimension to cut"
    dividing = [dim for dim in candidates if shape[dim] % ranks == 0]
    dim = max(dividing or candidates, key=lambda dim: shape[dim])
    return LeafLayout(tuple(shape), jnp.dtype(dtype), dim, ranks)


def parameter_layouts(parameters: Any, mesh: Mesh) -> Any:
    """A `LeafLayout` for each leaf of the parameter tree (arrays or shapes), over `SHARD_AXES`."""
    ranks = math.prod(mesh.shape[axis] for axis in SHARD_AXES)

    def layout(path: tuple[Any, ...], leaf: Any) -> LeafLayout:
        stacked = getattr(path[0], "key", None) == "layers"
        return leaf_layout(leaf.shape, leaf.dtype, ranks, stacked=stacked)

    return jax.tree_util.tree_map_with_path(layout, parameters)


def replicated(leaf: Any) -> LeafLayout:
    """The layout of a leaf that every device holds whole (a count, say)."""
    return LeafLayout(tuple(leaf.shape), jnp.dtype(leaf.dtype), None, 1)


def shardings(layouts: Any, mesh: Mesh) -> Any:
    """The `NamedSharding` of each padded leaf."""
    return jax.tree.map(lambda layout: NamedSharding(mesh, layout.spec()), layouts)


def abstract(layouts: Any, mesh: Mesh) -> Any:
    """The padded state as `jax.ShapeDtypeStruct`s with their shardings."""
    return jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(
            layout.padded_shape, layout.dtype, sharding=NamedSharding(mesh, layout.spec())
        ),
        layouts,
    )


def bytes_per_device(layouts: Any) -> int:
    """The bytes of the state that one device holds, padding included."""
    leaves = jax.tree.leaves(layouts)
    return sum(math.prod(layout.shard_shape) * layout.dtype.itemsize for layout in leaves)


def abstract_whole(layouts: Any, mesh: Mesh) -> Any:
    """What a checkpoint holds: the unpadded leaves, each sharded as far as its size allows."""
    return jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(
            layout.shape, layout.dtype, sharding=_whole_sharding(layout, mesh)
        ),
        layouts,
    )


def trim(state: Any, layouts: Any, mesh: Mesh) -> Any:
    """The state without padding, sharded as in `abstract_whole`; leaves without padding are shared
    with `state`, not copied."""
    return _resize(state, layouts, abstract_whole(layouts, mesh), LeafLayout.trim)


def pad(state: Any, layouts: Any, mesh: Mesh) -> Any:
    """The inverse of `trim`: whole leaves as the padded, sharded leaves of the training state."""
    return _resize(state, layouts, abstract(layouts, mesh), LeafLayout.pad)


def _resize(state: Any, layouts: Any, targets: Any, resize: Any) -> Any:
    def one(leaf: jax.Array, layout: LeafLayout, target: jax.ShapeDtypeStruct) -> jax.Array:
        if layout.padded_shape == layout.shape:
            return leaf
        return _compiled_resize(resize, layout, target.sharding)(leaf)

    return jax.tree.map(one, state, layouts, targets)


@functools.cache
def _compiled_resize(resize: Any, layout: LeafLayout, sharding: NamedSharding) -> Any:
    return jax.jit(functools.partial(resize, layout), out_shardings=sharding)


def _whole_sharding(layout: LeafLayout, mesh: Mesh) -> NamedSharding:
    """A sharding of the unpadded leaf over as many ranks as divide it.

    8,192 rows over 24 ranks are padded on the devices; without the padding they are cut over 8 of
    them and replicated 3 times, on a mesh with the same devices in the same order.
    """
    if layout.dim is None or layout.padded_shape == layout.shape:
        return NamedSharding(mesh, layout.spec())
    parts = math.gcd(layout.shape[layout.dim], layout.ranks)
    first = mesh.axis_names.index(SHARD_AXES[0])
    last = mesh.axis_names.index(SHARD_AXES[-1])
    outside, inside = mesh.devices.shape[:first], mesh.devices.shape[last + 1 :]
    devices = np.reshape(mesh.devices, (*outside, parts, layout.ranks // parts, *inside))
    names = (*mesh.axis_names[:first], "part", "copy", *mesh.axis_names[last + 1 :])
    return NamedSharding(Mesh(devices, names), layout.spec(("part",)))
