"""The training state as the model's leaves, whole and in its order, and back on the devices."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from geojax.sharding.leaf_layouts import LeafLayout, abstract, shardings


def abstract_unpadded(layouts: Any, mesh: Mesh) -> Any:
    """Return the leaves of a checkpoint: unpadded, each sharded as far as its size allows."""
    return jax.tree.map(
        lambda layout: jax.ShapeDtypeStruct(
            layout.shape, layout.dtype, sharding=_unpadded_sharding(layout, mesh)
        ),
        layouts,
    )


def trim(state: Any, layouts: Any, mesh: Mesh) -> Any:
    """Return the state without padding, sharded as in `abstract_unpadded`.

    Leaves that are as the model has them (`matches_model`) are shared with `state`, not copied.
    """
    return _resize(state, layouts, abstract_unpadded(layouts, mesh), LeafLayout.trim)


def on_host(state: Any, layouts: Any) -> Any:
    """Return the state without padding, as arrays of the host: nothing is compiled for it."""
    return jax.tree.map(
        lambda leaf, layout: np.asarray(layout.trim(np.asarray(leaf))), state, layouts
    )


def pad(state: Any, layouts: Any, mesh: Mesh) -> Any:
    """Invert `trim`: return whole leaves as the padded, sharded leaves of the training state."""
    return _resize(state, layouts, abstract(layouts, mesh), LeafLayout.pad)


def place(whole: Any, layouts: Any, mesh: Mesh) -> Any:
    """Return whole leaves, padded and on the devices, from one program for all of them."""
    padded = jax.jit(
        lambda tree: jax.tree.map(lambda leaf, layout: layout.pad(leaf), tree, layouts)
    )
    # From the host: slices of an array on a device are compiled.
    return jax.device_put(jax.device_get(padded(whole)), shardings(layouts, mesh))


def matches_model(layout: LeafLayout) -> bool:
    """True if the leaf on the devices is the model's, without padding and in its order."""
    in_order = layout.stages is None or layout.stages.is_order_of_leaf
    return in_order and layout.padded_shape == layout.shape


def _resize(state: Any, layouts: Any, targets: Any, resize: Any) -> Any:
    def one(leaf: jax.Array, layout: LeafLayout, target: jax.ShapeDtypeStruct) -> jax.Array:
        if matches_model(layout):
            return leaf
        return _compiled_resize(resize, layout, target.sharding)(leaf)

    return jax.tree.map(one, state, layouts, targets)


@functools.cache
def _compiled_resize(resize: Any, layout: LeafLayout, sharding: NamedSharding) -> Any:
    return jax.jit(functools.partial(resize, layout), out_shardings=sharding)


def _unpadded_sharding(layout: LeafLayout, mesh: Mesh) -> NamedSharding:
    """Shard the unpadded leaf over as many ranks as divide it.

    A dim of 8,192 over 24 ranks is padded on the devices; without the padding it is sharded over 8
    of them and replicated 3 times, on a mesh with the same devices in the same order in which the
    axis of 24 is two, of 8 and of 3.
    """
    spec = layout.model_spec()
    if matches_model(layout):
        return NamedSharding(mesh, spec)
    parts = dict.fromkeys(mesh.axis_names, 1)
    for size, axes in zip(layout.shape, spec, strict=False):
        # A PartitionSpec turns a tuple of one name into the name.
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            parts[axis] = math.gcd(size, mesh.shape[axis])
            size //= parts[axis]
            if parts[axis] < mesh.shape[axis]:
                break  # the blocks of the axes after it would not be contiguous
    split = [(parts[axis], mesh.shape[axis] // parts[axis]) for axis in mesh.axis_names]
    devices = np.reshape(mesh.devices, [size for pair in split for size in pair])
    names = [name for axis in mesh.axis_names for name in (axis, f"copies along {axis}")]
    return NamedSharding(Mesh(devices, names), spec)
