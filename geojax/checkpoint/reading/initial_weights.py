"""Reading the weights of a folder of safetensors onto the devices of any layout."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from geojax.checkpoint.agreement import first_text
from geojax.checkpoint.saved_array import Indices
from geojax.errors import UserError
from geojax.models.huggingface.tensor_map import Slices
from geojax.named_arrays import leaves_by_name
from geojax.optim.averages import restart_average
from geojax.sharding.leaf_layouts import PADDING, LeafLayout


class PartReader(Protocol):
    """Reads weights part by part (see `geojax.models.huggingface.tensor_map`)."""

    @property
    def stacked_dims(self) -> Mapping[str, int]:
        """Number of leading dims of each leaf, by name, that count layers and experts."""

    def check(self) -> None:
        """Check names, shapes and dtypes of all tensors; a UserError says what is wrong."""

    def read(self, leaf: str, stack: tuple[int, ...], slices: Slices) -> np.ndarray:
        """Read `slices` of a leaf's part for one layer (and expert)."""


class InitialWeights(PartReader, Protocol):
    """The weights of a whole model in a folder."""

    folder: Path

    def digest(self) -> str:
        """Return a digest that tells them from others."""


def with_weights(state: Any, weights: InitialWeights, layouts: Any, mesh: Mesh) -> Any:
    """Return an initial training state with other weights; its own are freed before those are read.

    Args:
        state: a dataclass with `parameters` and an `optimizer`, whose average of the weights is the
            only other part of it that depends on their values.
        weights: the checkpoint.
        layouts: see `read_weights`.
        mesh: the mesh of the layouts.

    Raises:
        UserError: see `read_weights`.
    """
    for leaf in jax.tree.leaves(state.parameters):
        leaf.delete()
    read = read_weights(weights, layouts, mesh)
    optimizer = restart_average(state.optimizer, read)
    return dataclasses.replace(state, parameters=read, optimizer=optimizer)


def read_weights(weights: PartReader, layouts: Any, mesh: Mesh) -> Any:
    """Read master weights onto a mesh; each process reads what its own devices hold.

    A leaf goes to the devices before the next one is read, so that the host holds little more than
    the largest leaf's shards of its devices.

    Args:
        weights: the checkpoint.
        layouts: a tree of `LeafLayout`s of parameters, of the whole model or of a site's part.
        mesh: the mesh of the layouts.

    Raises:
        UserError: a tensor has another shape or a dtype that is not carried, or a file is missing
            or damaged. All processes agree on the first one's findings before any weight is read.
    """
    problem = None
    if jax.process_index() == 0:
        try:
            weights.check()
        except UserError as error:
            problem = str(error)
    if problem := first_text(problem):
        raise UserError(problem)
    leaves = []
    try:
        for name, layout in leaves_by_name(layouts).items():
            leaves.append(_read_leaf(weights, name, layout, mesh))
    except UserError as error:
        problem = str(error)
    if problem := first_text(problem):
        raise UserError(problem)
    return jax.tree.unflatten(jax.tree.structure(layouts), leaves)


def _read_leaf(weights: PartReader, name: str, layout: LeafLayout, mesh: Mesh) -> jax.Array:
    sharding = NamedSharding(mesh, layout.spec())
    indices = layout.model_indices()
    devices_of: dict[Any, list[jax.Device]] = {}
    wanted_by_key: dict[Any, Indices] = {}
    for device, place in sharding.addressable_devices_indices_map(layout.padded_shape).items():
        assert place is not None, "a device holds a shard of every leaf"
        wanted = tuple(dim[at] for dim, at in zip(indices, place, strict=True))
        key = tuple(dim.tobytes() for dim in wanted)
        devices_of.setdefault(key, []).append(device)
        wanted_by_key[key] = wanted
    arrays = []
    for key, devices in devices_of.items():
        shard = _read_shard(weights, name, layout, wanted_by_key[key])
        arrays += [jax.device_put(shard, device) for device in devices]
    return jax.make_array_from_single_device_arrays(layout.padded_shape, sharding, arrays)


def _read_shard(weights: PartReader, name: str, layout: LeafLayout, wanted: Indices) -> np.ndarray:
    """Read one device's shard; what the model does not have is zero."""
    shard = np.zeros([dim.size for dim in wanted], layout.dtype)
    target = shard
    if layout.has_stage_dim:
        if wanted[0][0] == PADDING:
            return shard
        target, wanted = shard[0], wanted[1:]
    held = [np.flatnonzero(dim != PADDING) for dim in wanted]
    if not all(each.size for each in held):
        return shard
    stacked = weights.stacked_dims[name]
    inside = tuple(_block(positions) for positions in held[stacked:])
    slices = tuple(
        _block(dim[positions])
        for dim, positions in zip(wanted[stacked:], held[stacked:], strict=True)
    )
    for position in itertools.product(*(positions.tolist() for positions in held[:stacked])):
        stack = tuple(int(dim[at]) for dim, at in zip(wanted, position, strict=False))
        place: tuple[Any, ...] = (*position, *inside)
        target[place] = weights.read(name, stack, slices)
    return shard


def _block(positions: np.ndarray) -> slice:
    """Return consecutive positions as a slice."""
    assert (np.diff(positions) == 1).all(), "a shard is one block along dims that are not stacked"
    return slice(int(positions[0]), int(positions[-1]) + 1)
