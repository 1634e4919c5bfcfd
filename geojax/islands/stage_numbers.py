"""Numbers of the stages of a site, which may be in several processes, gathered in all of these."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def of_all_stages(own: Mapping[int, np.ndarray], mesh: Mesh) -> np.ndarray:
    """Gather an array of each stage of a site; its processes call this in the same order.

    Args:
        own: [..., n] of each stage that this process holds a part of, by the stage's number in the
            site; of 32 or 64 bits a number.
        mesh: the site's devices.

    Returns:
        [stages, ..., n], equal in all processes.
    """
    if len(own) == mesh.shape["stage"]:
        return np.stack([own[stage] for stage in sorted(own)])
    # Arrays of JAX have no 64 bits unless it is told so.
    words = {stage: np.ascontiguousarray(each).view(np.uint32) for stage, each in own.items()}
    first, *_ = own

    def of_device(place: tuple[slice, ...] | None) -> np.ndarray:
        assert place is not None, "an addressable device must have a share"
        return words[place[0].start][None]

    shape = (mesh.shape["stage"], *words[first].shape)
    shares = NamedSharding(mesh, PartitionSpec("stage"))
    gathered = _gather(mesh)(jax.make_array_from_callback(shape, shares, of_device))
    return np.asarray(gathered.addressable_data(0)).view(own[first].dtype)


@functools.cache
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda each: each, out_shardings=NamedSharding(mesh, PartitionSpec()))
