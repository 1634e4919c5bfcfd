"""The bytes of a message in host memory: those of its shards, one after the other."""

import math
from collections.abc import Sequence

import jax
import numpy as np

_ALIGNMENT_BYTES = 64
"""XLA for CPUs takes memory as it is that begins at a multiple of it, and copies other memory."""


class HostBytes:
    """Memory of the shards of a message, seen as one row of bytes.

    Args:
        shards: bytes of each shard.
    """

    def __init__(self, shards: Sequence[memoryview]):
        self.size = sum(shard.nbytes for shard in shards)
        """Bytes of the message."""
        self._shards = [shard for shard in shards if shard.nbytes]

    def part(self, offset: int, count: int) -> list[memoryview]:
        """Return `count` bytes from `offset` on, in pieces that lie in memory as one."""
        pieces = []
        for shard in self._shards:
            if not count:
                break
            if offset < shard.nbytes:
                pieces.append(shard[offset : offset + count])
                count -= pieces[-1].nbytes
            offset = max(0, offset - shard.nbytes)
        return pieces


def bytes_of(shards: Sequence[jax.Array] | Sequence[np.ndarray]) -> HostBytes:
    """Return the bytes of computed shards: host memory as it is, or else a copy there."""
    return HostBytes([_bytes_of(np.asarray(shard)) for shard in shards])


class ArrivingShards:
    """Host memory for the shards of a message that arrives.

    Args:
        shapes: shape, dtype and device of each shard.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct]):
        self._shapes = shapes
        self._arrays = [_empty(shape) for shape in shapes]
        self.bytes = HostBytes([_bytes_of(array) for array in self._arrays])

    def on_devices(self) -> list[jax.Array]:
        """Return the shards on their devices.

        On CPUs an array is this memory itself, which nobody may write to from now on.
        """
        devices = [next(iter(shape.sharding.device_set)) for shape in self._shapes]
        return list(jax.device_put(self._arrays, devices, may_alias=True))


def size_of(shapes: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Return the bytes of shards of these shapes and dtypes."""
    return sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in shapes)


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _empty(shape: jax.ShapeDtypeStruct) -> np.ndarray:
    size = size_of([shape])
    memory = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[start : start + size].view(shape.dtype).reshape(shape.shape)
