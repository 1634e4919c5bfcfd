"""Networks of a site as collectives meet them: bandwidth and latency of a group of ranks.

A collective over some mesh axes runs in rings, or for short all-reduces in trees (NCCL). With n
ranks of which h share a host, and S bytes that each sends,

    ring    S / min(NVLink, h network cards) + (steps of the ring) x latency
    tree    an all-reduce of short messages: 2 log2(n) latencies instead of 2 (n - 1)

since a ring enters and leaves a host over the cards of all its members (Hu et al. 2025,
"Demystifying NCCL", for both algorithms; nccl-tests, PERFORMANCE.md, for S and bus bandwidth).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import numpy as np

from geojax.mesh import AXES
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.prediction import Network
from geojax.topology import Link, Site

DEFAULT_ROUND_TRIP_SECONDS = {"inside_host": 4e-6, "between_hosts": 12e-6}
"""Round trip of a small message where the topology has none: NVLink and InfiniBand with NCCL's
protocols (PERFORMANCE.md of nccl-tests: 5 to 20 us for all-reduces of a few bytes)."""


@dataclasses.dataclass(frozen=True)
class RankNetwork:
    """The network between the ranks of one group."""

    network: Network
    bytes_per_second: float
    """Bytes that each rank sends in a second while all of them do."""
    latency_seconds: float
    """Time of one step of a ring."""
    ranks: int

    def seconds(self, sent_bytes: float, messages: float = 1) -> float:
        """Return the time in which every rank sends so many bytes in so many ring collectives."""
        if self.ranks == 1 or not sent_bytes:
            return 0.0
        return sent_bytes / self.bytes_per_second + messages * self.steps * self.latency_seconds

    @property
    def steps(self) -> int:
        """Steps of an all-gather or reduce-scatter: of a ring, or of a tree where that is less."""
        return min(self.ranks - 1, 2 * math.ceil(math.log2(self.ranks)) if self.ranks > 1 else 0)


@dataclasses.dataclass(frozen=True)
class SiteNetworks:
    """The networks of one site for a mesh of given sizes."""

    site: Site
    sizes: Mapping[str, int]
    calibration: Calibration

    def group(self, axes: tuple[str, ...]) -> RankNetwork:
        """Return the network of the ranks along `axes`, none of them `dc`."""
        sizes = tuple(self.sizes[axis] for axis in AXES if axis != "dc")
        together, ranks = _ranks_on_a_host(sizes, axes, self.site.accelerators_per_host)
        inside, between = self._inside_host(), self._between_hosts()
        if together == ranks:
            return RankNetwork("inside_host", *inside, ranks)
        rate = min(inside[0], together * between[0]) if together > 1 else between[0]
        return RankNetwork("between_hosts", rate, between[1], ranks)

    def hop(self) -> RankNetwork:
        """Return the network of a rank and its peer in the next pipeline stage."""
        devices = math.prod(self.sizes[axis] for axis in AXES if axis not in ("dc", "stage"))
        if devices < self.site.accelerators_per_host:
            return RankNetwork("inside_host", *self._inside_host(), 2)
        return RankNetwork("between_hosts", *self._between_hosts(), 2)

    def _inside_host(self) -> tuple[float, float]:
        accelerator = self.site.accelerator
        return self._rate(
            self.site.inside_host,
            accelerator.inside_host_bytes_per_second,
            "inside_host",
            self.calibration.inside_host,
        )

    def _between_hosts(self) -> tuple[float, float]:
        accelerator = self.site.accelerator
        return self._rate(
            self.site.between_hosts,
            accelerator.between_hosts_bytes_per_second or accelerator.inside_host_bytes_per_second,
            "between_hosts",
            self.calibration.between_hosts,
        )

    @staticmethod
    def _rate(
        link: Link | None, published: float | None, network: str, share: float
    ) -> tuple[float, float]:
        if link is not None:
            return share * link.bytes_per_second, link.round_trip_seconds / 2
        rate = math.inf if published is None else share * published
        return rate, DEFAULT_ROUND_TRIP_SECONDS[network] / 2


@functools.lru_cache(maxsize=4096)
def _ranks_on_a_host(
    sizes: tuple[int, ...], axes: tuple[str, ...], per_host: int
) -> tuple[int, int]:
    """Count the ranks of the first group along `axes` that lie on its first host, and all."""
    names = [axis for axis in AXES if axis != "dc"]
    strides = np.cumprod([1, *sizes[::-1]])[:-1][::-1]
    spans = [
        range(0, size * int(stride), int(stride))
        for name, size, stride in zip(names, sizes, strides, strict=True)
        if name in axes
    ]
    places = [sum(place) for place in itertools.product(*spans)]
    return sum(place < per_host for place in places), len(places)
