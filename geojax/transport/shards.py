"""Arrays on a mesh as the distinct shards that one process holds, and back.

Shards are in the order of their place in the array, which is the same in both sites.
"""

from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

_Start = tuple[int, ...]


def local_shards(array: jax.Array) -> list[jax.Array]:
    """Return each distinct shard of an array that this process holds, once."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    return [shards[device] for device in _owners(array.shape, array.sharding).values()]


def local_shapes(like: jax.ShapeDtypeStruct) -> list[jax.ShapeDtypeStruct]:
    """Return shape, dtype and device of each shard that `local_shards` returns of such an array."""
    shape = like.sharding.shard_shape(like.shape)
    return [
        jax.ShapeDtypeStruct(shape, like.dtype, sharding=SingleDeviceSharding(device))
        for device in _owners(like.shape, like.sharding).values()
    ]


def joined(like: jax.ShapeDtypeStruct, shards: Sequence[jax.Array]) -> jax.Array:
    """Return the array with these distinct local shards; copy them to where they repeat."""
    owners = _owners(like.shape, like.sharding)
    by_start = dict(zip(owners, shards, strict=True))
    placed = [
        by_start[start] if device == owners[start] else jax.device_put(by_start[start], device)
        for device, start in _starts(like.shape, like.sharding).items()
    ]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed)


def _owners(shape: Sequence[int], sharding: jax.sharding.Sharding) -> dict[_Start, jax.Device]:
    """Return a device of this process for each distinct shard, by the shard's first element."""
    devices = {start: device for device, start in _starts(shape, sharding).items()}
    return {start: devices[start] for start in sorted(devices)}


def _starts(shape: Sequence[int], sharding: jax.sharding.Sharding) -> dict[jax.Device, _Start]:
    indices = sharding.addressable_devices_indices_map(tuple(shape))
    return {
        device: tuple(part.start or 0 for part in index or ()) for device, index in indices.items()
    }
