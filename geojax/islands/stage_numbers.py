"""Numbers of the stages of a site, which may be in several processes, gathered in all of these."""

from collections.abc import Mapping

import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh


def of_all_stages(own: Mapping[int, np.ndarray], mesh: Mesh) -> np.ndarray:
    """Gather an array of each stage of a site; its processes call this in the same order.

    Args:
        own: [..., n] of each stage that this process holds a part of, by the stage's number in the
            site; of 32 or 64 bits a number.
        mesh: the site's devices.

    Returns:
        [stages, ..., n], equal in all processes.
    """
    rows, stages = np.stack([own[stage] for stage in sorted(own)]), mesh.shape["stage"]
    if len(own) == stages:
        return rows
    # Arrays of JAX have no 64 bits unless it is told so.
    words = rows.view(np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(words)).reshape(-1, *words.shape[1:])
    # Processes are in the order of stages, and those that hold the same one say the same of it.
    return gathered[:: len(gathered) // stages].view(rows.dtype)
