"""Arrays on a mesh as the distinct shards that a process holds, and back.

Shards are in the order of their place in the array, which is the same in all sites. A process that
exchanges messages with several of another site divides its devices among them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

OwnDevices: TypeAlias = frozenset[jax.Device] | None
"""Devices of this process; None: all of them."""
_Start = tuple[int, ...]


def local_shards(array: jax.Array, devices: OwnDevices = None) -> list[jax.Array]:
    """Return each distinct shard of an array that these devices hold, once."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    owners = _owners(array.shape, array.sharding, devices)
    return [shards[device] for device in owners.values()]


def local_shapes(
    like: jax.ShapeDtypeStruct, devices: OwnDevices = None
) -> list[jax.ShapeDtypeStruct]:
    """Return shape, dtype and device of each shard that `local_shards` returns of such an array."""
    shape = like.sharding.shard_shape(like.shape)
    return [
        jax.ShapeDtypeStruct(shape, like.dtype, sharding=SingleDeviceSharding(device))
        for device in _owners(like.shape, like.sharding, devices).values()
    ]


class HeldArray(NamedTuple):
    """The shards of an array that this process holds, copied to host memory."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    copies: Mapping[_Start, np.ndarray]
    """Each distinct shard, by the place of its first element."""

    @classmethod
    def of(cls, array: jax.Array) -> "HeldArray":
        """Copy the shards of an array."""
        starts = _owners(array.shape, array.sharding, None)
        copies = map(np.array, local_shards(array))
        return cls(array.shape, array.sharding, dict(zip(starts, copies, strict=True)))

    def shards(self, devices: OwnDevices = None) -> list[np.ndarray]:
        """Return what `local_shards` returns of the array."""
        return [self.copies[start] for start in _owners(self.shape, self.sharding, devices)]


def joined(
    like: jax.ShapeDtypeStruct, of_devices: Sequence[tuple[OwnDevices, Sequence[jax.Array]]]
) -> jax.Array:
    """Return the array with these distinct shards of devices; copy them to where they repeat."""
    placed = {}
    for devices, shards in of_devices:
        owners = _owners(like.shape, like.sharding, devices)
        by_start = dict(zip(owners, shards, strict=True))
        for device, start in _starts(like.shape, like.sharding, devices).items():
            shard = by_start[start]
            placed[device] = shard if device == owners[start] else jax.device_put(shard, device)
    order = _starts(like.shape, like.sharding, None)
    return jax.make_array_from_single_device_arrays(
        like.shape, like.sharding, [placed[device] for device in order]
    )


def _owners(
    shape: Sequence[int], sharding: jax.sharding.Sharding, among: OwnDevices
) -> dict[_Start, jax.Device]:
    """Return one of these devices for each distinct shard, by the shard's first element."""
    devices = {start: device for device, start in _starts(shape, sharding, among).items()}
    return {start: devices[start] for start in sorted(devices)}


def _starts(
    shape: Sequence[int], sharding: jax.sharding.Sharding, among: OwnDevices
) -> dict[jax.Device, _Start]:
    indices = sharding.addressable_devices_indices_map(tuple(shape))
    return {
        device: tuple(part.start or 0 for part in index or ())
        for device, index in indices.items()
        if among is None or device in among
    }
