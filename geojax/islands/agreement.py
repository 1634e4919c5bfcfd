"""A check at run time that sites in role data hold the same bits.

    every rank    sum of the bits of its shards, as integers modulo 2^32
    every site    sum over its ranks
    between sites exchange of the sums: equal, or the run ends

Sites add the same numbers in the same order, so that weights can differ only if a device or a link
has failed; going on would save a state that is none.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from geojax.collectives.axes import to_varying
from geojax.islands.walk import Walk
from geojax.mesh import AXES


class Agreement:
    """The check of one site.

    Args:
        walk: the site's.
    """

    def __init__(self, walk: Walk):
        self._walk = walk
        programs = walk.programs
        parameters = jax.tree.map(lambda layout: layout.spec(), programs.layouts.parameters)
        mapped = jax.shard_map(
            checksum,
            mesh=programs.plan.mesh,
            in_specs=(parameters,),
            out_specs=PartitionSpec(),
            check_vma=True,
        )
        self._checksum = jax.jit(mapped)
        self._agreed_step: int | None = None

    def differing_sites(self, step: int, parameters: Any) -> list[int]:
        """List the sites whose weights are not those of the first one; all sites call it together.

        A site that calls it again after the same step, to save once more, asks no other.

        Args:
            step: number of steps done.
            parameters: the site's master weights.

        Raises:
            RunError: another site is lost.
        """
        if step == self._agreed_step:
            return []
        sums = self._walk.of_all_sites(self._checksum(parameters))
        first, *others = (int(each) for each in jax.device_get(sums))
        differing = [site for site, own in enumerate(others, 1) if own != first]
        self._agreed_step = None if differing else step
        return differing


def checksum(shards: Any) -> jax.Array:
    """Sum the bits of all ranks' shards modulo 2^32, inside a `shard_map`."""

    def bits(leaf: jax.Array, salt: int) -> jax.Array:
        words = lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
        # Each word counts by its position, so that swapped ones show.
        weights = lax.iota(jnp.uint32, words.size) * jnp.uint32(2 * salt + 1) + jnp.uint32(1)
        return jnp.sum(words * weights, dtype=jnp.uint32)

    leaves = jax.tree.leaves(shards)
    own = [to_varying(bits(leaf, number), AXES) for number, leaf in enumerate(leaves)]
    return lax.psum(jnp.sum(jnp.stack(own), dtype=jnp.uint32), AXES)
