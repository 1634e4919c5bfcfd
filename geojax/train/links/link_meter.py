"""The rate of the links of one program, timed on messages of its own between steps.

Nobody sees the messages of one program, and every host of a site sends at the same time: a link is
timed with all devices of both sites, by the permutes that hops and buckets travel in. Each message
goes there and back, small and large, so that round trips cancel:

    rate of a device = 2 x bytes / (seconds of the large one - seconds of the small one)
"""

import itertools
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.topology import Topology

_SECONDS = 0.2
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**26
_REPEATS = 2


class LinkMeter:
    """Messages over each link of a mesh, compiled; all processes call its methods together.

    Args:
        mesh: the run's, with sites along `dc`.
        names: the sites' names, in order.
        topology: tells how large a message should be.
    """

    def __init__(self, mesh: Mesh, names: tuple[str, ...], topology: Topology):
        self._mesh = mesh
        self._devices = mesh.size // mesh.shape["dc"]
        self._pairs = {
            (names[first], names[second]): (first, second)
            for first, second in itertools.combinations(range(len(names)), 2)
        }
        rates = [topology.link(*pair).bytes_per_second for pair in self._pairs]
        share = int(_SECONDS * max(rates) / self._devices)
        self._bytes = min(max(share, _LEAST_BYTES), _MOST_BYTES)
        self._programs = {
            (pair, size): self._there_and_back(sites, size)
            for pair, sites in self._pairs.items()
            for size in (self._small, self._bytes)
        }

    _small = 4

    def rates(self) -> Mapping[tuple[str, str], float]:
        """Return bytes per second of each link, in the slower direction, by the names of its sites.

        Process 0 times; the others' figures say nothing of sites that they are not in.
        """
        return {
            pair: 2 * self._bytes * self._devices / max(self._seconds(pair), 1e-9)
            for pair in self._pairs
        }

    def _seconds(self, pair: tuple[str, str]) -> float:
        large, small = (self._least(pair, size) for size in (self._bytes, self._small))
        return large - small

    def _least(self, pair: tuple[str, str], size: int) -> float:
        program = self._programs[pair, size]
        axes = self._mesh.axis_names
        sharding = NamedSharding(self._mesh, PartitionSpec(axes))
        message = jnp.zeros((self._mesh.size, size // 4), jnp.float32, device=sharding)
        jax.block_until_ready(program(message))  # connects, and TCP finds its rate
        times = []
        for _ in range(_REPEATS):
            start = time.monotonic()
            jax.block_until_ready(program(message))
            times.append(time.monotonic() - start)
        return min(times)

    def _there_and_back(self, sites: tuple[int, int], size: int) -> jax.stages.Compiled:
        axes = self._mesh.axis_names
        first, second = sites
        pairs = [(first, second), (second, first)]

        def send(message: jax.Array) -> jax.Array:
            there = jax.lax.ppermute(message, "dc", pairs) + 1
            back = jax.lax.ppermute(there, "dc", pairs)
            return jax.lax.psum(back.sum(), axes)  # everybody waits for the slowest

        sharded = PartitionSpec(axes)
        program = jax.jit(
            jax.shard_map(send, mesh=self._mesh, in_specs=sharded, out_specs=PartitionSpec())
        )
        message = jax.ShapeDtypeStruct(
            (self._mesh.size, size // 4), np.float32, sharding=NamedSharding(self._mesh, sharded)
        )
        return program.lower(message).compile()
