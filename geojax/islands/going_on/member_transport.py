"""The transport to the sites that take part, of whom some may be lost while others wait."""

import time
from collections.abc import Mapping, Sequence

import jax

from geojax.islands.exchange import LostSiteError
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.transport import (
    Fetch,
    LostPeerError,
    MeasuredLink,
    MessageKey,
    PeerCounters,
    SocketFigures,
    ToldFigures,
)
from geojax.transport.mute import zeros

_POLL_SECONDS = 0.01
_UNCOUNTED = PeerCounters()
"""Counters of a site that is lost in a step whose messages come to nobody."""


class MemberTransport:
    """One site's end; `geojax.transport.protocol.Transport` documents its methods.

    Nothing fails because a site is lost: whoever waits for it waits until the others have decided.
    A step then begins again: until its end the others' messages are zeros, which nobody uses. Other
    messages of the lost site are left out.

    Args:
        membership: the site's, with the transport to all sites.
    """

    def __init__(self, membership: SiteMembership):
        self._membership, self._all = membership, membership.transport
        self.site, self.sites = self._all.site, self._all.sites
        self.site_names: Sequence[str] = self._all.site_names

    @property
    def counters(self) -> Mapping[int, PeerCounters]:
        """Traffic with each other site that takes part, by its number."""
        counters = self._all.counters
        sites = sorted(self._membership.taking_part - {self.site})
        return {site: counters.get(site, _UNCOUNTED) for site in sites}

    def offer(
        self,
        receiver: int,
        key: MessageKey,
        arrays: Sequence[jax.Array],
        *,
        yields: bool = False,
    ) -> None:
        """Offer arrays to one other site, if it lives and the step does not begin again."""
        if receiver in self.counters and not self._membership.is_interrupted:
            try:
                self._all.offer(receiver, key, arrays, yields=yields)
            except LostPeerError:
                self._membership.poll()

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> Fetch:
        """Begin to fetch what another site offers."""
        fetch = None
        if sender in self.counters and not self._membership.is_interrupted:
            try:
                fetch = self._all.fetch(sender, key, like)
            except LostPeerError:
                self._membership.poll()
        return _MemberFetch(self._membership, sender, fetch, like)

    def check(self) -> None:
        """Take in what has happened."""
        self._membership.poll()

    def missing_from_peer(self) -> str | None:
        """Return what a peer has not done that this process waits for; None: it does not wait."""
        return self._all.missing_from_peer()

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return what was measured of the link to each other site since the last call."""
        return self._all.measured()

    def tell(self, receiver: int, figures: bytes) -> None:
        """Tell another site figures, soon or never."""
        self._all.tell(receiver, figures)

    def told(self, sender: int) -> ToldFigures | None:
        """Return the newest figures that another site has told."""
        return self._all.told(sender)

    def socket_figures(self) -> Mapping[int, SocketFigures]:
        """Return how the kernel sees the link to each other site."""
        return self._all.socket_figures()

    def drain(self) -> None:
        """Wait until the peers have fetched all offers."""
        self._all.drain()

    def close(self, *, failed: bool = False) -> None:
        """End all transfers and connections."""
        self._all.close(failed=failed)


class _MemberFetch:
    """A message of a site; `geojax.transport.protocol.Fetch` documents it.

    Args:
        membership: the own site's.
        sender: the site.
        fetch: the message; None: the site is lost.
        like: its arrays.
    """

    def __init__(
        self,
        membership: SiteMembership,
        sender: int,
        fetch: Fetch | None,
        like: Sequence[jax.ShapeDtypeStruct],
    ):
        self._membership, self._sender, self._fetch = membership, sender, fetch
        self._like = like
        self._link = membership.transport.links.get(sender)
        self.arrival: float | None = None

    def arrived(self) -> bool:
        return self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        if self._membership.is_interrupted:
            return True
        if self._fetch is None:
            time.sleep(seconds)
            return False
        arrived = self._fetch.wait(seconds)
        self.arrival = self._fetch.arrival
        return arrived

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        links, link = self._membership.transport.links, self._link
        while not self.wait(_POLL_SECONDS):
            self._membership.poll()
            if self._membership.is_interrupted:
                break
            if link is None or links.get(self._sender) is not link:
                name = self._membership.transport.site_names[self._sender]
                raise LostSiteError(f"the run goes on without site {name}")
            if self._fetch is not None and link.finished:
                break  # which is an error
        if self._membership.is_interrupted:
            return zeros(self._like)
        assert self._fetch is not None, "a message that has arrived was fetched"
        return self._fetch.result(timeout_seconds)
