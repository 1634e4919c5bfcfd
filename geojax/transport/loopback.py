"""A transport inside one process: sites are sub-meshes of its devices, and walk in threads.

The stages of a site exchange their messages so, and so do the sites of a test.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from geojax.errors import RunError
from geojax.transport.in_flight import InFlight
from geojax.transport.link_clock import MeasuredLink
from geojax.transport.private import is_ready
from geojax.transport.protocol import (
    MessageKey,
    PeerCounters,
    SocketFigures,
    ToldFigures,
    Transport,
)

_UNLIMITED_BYTES = 1 << 62
_POLL_SECONDS = 0.05


def loopback(
    sites: int, limit_bytes: int = _UNLIMITED_BYTES, silence_seconds: float = 60.0
) -> list[Transport]:
    """Return transports that join `sites` meshes of this process, one for each site.

    Sites may be threads, or take turns in one thread if no offer has to wait.

    Args:
        sites: number of sites.
        limit_bytes: most bytes that one site has in flight to another.
        silence_seconds: time after which a fetch gives up.
    """
    links = {
        (sender, receiver): _LoopbackLink() for sender in range(sites) for receiver in range(sites)
    }  # a site's link to itself is never used
    return [_Loopback(site, sites, links, limit_bytes, silence_seconds) for site in range(sites)]


class _LoopbackMessage(NamedTuple):
    """A message that has been offered and not fetched."""

    arrays: Sequence[jax.Array]
    counted_bytes: int
    """Bytes that count as in flight."""


class _LoopbackLink:
    """Messages from one site to another that have been offered and not fetched."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.offered: dict[MessageKey, _LoopbackMessage] = {}
        self.told: ToldFigures | None = None
        self.closed = self.lost = False
        self.in_flight: InFlight


class _Loopback:
    """One site's end; `geojax.transport.protocol.Transport` documents its methods."""

    def __init__(
        self,
        site: int,
        sites: int,
        links: Mapping[tuple[int, int], _LoopbackLink],
        limit_bytes: int,
        silence_seconds: float,
    ):
        self.site, self.sites = site, sites
        self.site_names: Sequence[str] = [str(each) for each in range(sites)]
        self.silence_seconds = silence_seconds
        self.links = links
        peers = [peer for peer in range(sites) if peer != site]
        self.counters: Mapping[int, PeerCounters] = {peer: PeerCounters() for peer in peers}
        for peer in peers:
            links[site, peer].in_flight = InFlight(
                f"site {peer}", limit_bytes, self.counters[peer], self.check
            )

    def offer(
        self,
        receiver: int,
        key: MessageKey,
        arrays: Sequence[jax.Array],
        *,
        yields: bool = False,
    ) -> None:
        self.check()
        link = self.links[self.site, receiver]
        assert key not in link.offered, f"{key} is offered to site {receiver} once"
        size = 0 if yields else sum(array.nbytes for array in arrays)
        link.in_flight.add(key, size)
        with link.changed:
            link.offered[key] = _LoopbackMessage(arrays, size)
            link.changed.notify_all()

    def fetch(
        self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]
    ) -> "_LoopbackFetch":
        self.check()
        return _LoopbackFetch(self, sender, key, like)

    def check(self) -> None:
        for peer in self.counters:
            if self.links[peer, self.site].lost:
                raise RunError(f"transport: site {peer} has left; restart the run with all sites")

    def measured(self) -> Mapping[int, MeasuredLink]:
        return {}

    def tell(self, receiver: int, figures: bytes) -> None:
        self.links[self.site, receiver].told = ToldFigures(figures, time.monotonic())

    def told(self, sender: int) -> ToldFigures | None:
        return self.links[sender, self.site].told

    def socket_figures(self) -> Mapping[int, SocketFigures]:
        return {}

    def drain(self) -> None:
        deadline = time.monotonic() + self.silence_seconds
        while left := sum(each.messages_in_flight for each in self.counters.values()):
            self.check()
            if time.monotonic() > deadline:
                raise RunError(f"transport: {left} messages of site {self.site} are not fetched")
            time.sleep(_POLL_SECONDS)

    def close(self, *, failed: bool = False) -> None:
        for peer in self.counters:
            link = self.links[self.site, peer]
            with link.changed:
                link.closed, link.lost = True, failed or bool(link.offered)
                link.offered.clear()
                link.changed.notify_all()


class _LoopbackFetch:
    """A message that is offered, or will be; `geojax.transport.protocol.Fetch` documents it."""

    def __init__(
        self, end: _Loopback, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]
    ):
        self.end, self.sender, self.key, self.like = end, sender, key, like
        self.arrival: float | None = None
        self.arrays: list[jax.Array] | None = None

    def arrived(self) -> bool:
        self._take()
        if self.arrival is None and self.arrays is not None and all(map(is_ready, self.arrays)):
            self.arrival = time.monotonic()
        return self.arrival is not None

    def wait(self, seconds: float) -> bool:
        link = self.end.links[self.sender, self.end.site]
        with link.changed:
            taken = link.changed.wait_for(self._take, seconds)
        if taken and not self.arrived():  # not computed yet
            time.sleep(seconds)
        return self.arrived()

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        start = time.monotonic()
        limit = self.end.silence_seconds if timeout_seconds is None else timeout_seconds
        link = self.end.links[self.sender, self.end.site]
        with link.changed:
            while not self._take():
                if time.monotonic() - start > limit:
                    raise RunError(
                        f"transport: {self.key} did not come from site {self.sender} within "
                        f"{limit:g} seconds; is its schedule the same as here?"
                    )
                self.end.check()
                if link.closed:
                    raise RunError(f"transport: site {self.sender} has finished without {self.key}")
                link.changed.wait(_POLL_SECONDS)
        assert self.arrays is not None
        jax.block_until_ready(self.arrays)
        assert self.arrived(), "the arrays are here"
        return self.arrays

    def _take(self) -> bool:
        """Take the message if it has been offered; return True if it is taken."""
        if self.arrays is not None:
            return True
        link = self.end.links[self.sender, self.end.site]
        offered = link.offered.pop(self.key, None)
        if offered is None:
            return False
        assert len(offered.arrays) == len(self.like), f"{self.key} has {len(self.like)} arrays"
        for array, wanted in zip(offered.arrays, self.like, strict=True):
            got, expected = (array.shape, array.dtype), (wanted.shape, wanted.dtype)
            assert got == expected, f"{self.key} is offered as it is fetched: {got}, {expected}"
        # A copy even on the same devices: the sender may donate its own once this is acknowledged.
        self.arrays = [
            jax.device_put(array, wanted.sharding, may_alias=False)
            for array, wanted in zip(offered.arrays, self.like, strict=True)
        ]
        link.in_flight.acknowledge(offered.counted_bytes)
        return True
