"""A check at run time that sites hold the same bits of the weights that they share.

    every rank    sum of the bits of its shards, as integers modulo 2^32
    every site    sum over its ranks
    between sites exchange of the sums: equal, or the run ends

In role data sites share all weights, in role stage a tied table. They add the same numbers in the
same order, so that weights can differ only if a device or a link has failed; going on would save a
state that is none.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.collectives.axes import to_varying
from geojax.islands.exchange import Exchange
from geojax.mesh import AXES


class Agreement:
    """The check of one site.

    Args:
        exchange: the site's.
        mesh: devices that hold the weights, if this is one of `holders`; else any of the site.
        layouts: the `LeafLayout` of each leaf of the weights; {} on a site that has none of them.
        holders: the sites that hold these weights.
    """

    def __init__(self, exchange: Exchange, mesh: Mesh, layouts: Any, holders: Sequence[int]):
        self._exchange, self._holders = exchange, holders
        mapped = jax.shard_map(
            checksum,
            mesh=mesh,
            in_specs=(jax.tree.map(lambda layout: layout.spec(), layouts),),
            out_specs=PartitionSpec(),
            check_vma=True,
        )
        self._checksum = jax.jit(mapped, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._agreed_step: int | None = None

    def rehearse(self, weights: Any) -> None:
        """Compile the check, which asks no other site for it."""
        jax.block_until_ready(self._checksum(weights))

    def differing_sites(self, step: int, weights: Any) -> list[int]:
        """List the sites whose weights are not those of the first holder; all sites call it.

        A site is left out if the run goes on without it.

        A site that calls it again after the same step, to save once more, asks no other.

        Args:
            step: number of steps done.
            weights: the site's master weights; {} on a site that has none of them.

        Raises:
            RunError: another site is lost.
        """
        if step == self._agreed_step:
            return []
        sums = jax.device_get(self._exchange.of_all_sites(self._checksum(weights)))
        holders = [site for site in self._holders if site in sums]
        first = int(sums[holders[0]])
        differing = [site for site in holders if int(sums[site]) != first]
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
    if not leaves:
        return jnp.uint32(0)
    own = [to_varying(bits(leaf, number), AXES) for number, leaf in enumerate(leaves)]
    return lax.psum(jnp.sum(jnp.stack(own), dtype=jnp.uint32), AXES)
