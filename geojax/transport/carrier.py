"""The transport between runtimes on different hosts: messages go through host memory and TCP.

Each process exchanges its own shards with its counterpart, the process of the same index, in every
other site. The receiver asks for a message, and gets it when it is offered and computed, so that a
fetch issued early costs no round trip:

    sender:   offer → computed, and asked for → pieces over the connections → acknowledged, let go
    receiver: fetch asks → pieces come → on the devices → acknowledged on the control connection

On CPUs nothing is copied but by TCP: a message is sent from the memory of its arrays, and becomes
arrays where it has come. On other devices the host holds what is offered, which the limit of bytes
in flight bounds, and what arrives.

A peer that is lost ends its own link alone. When its process has started again, `take_up` replaces
the link, and the others never notice; `give_up` goes on without it.
"""

import atexit
import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from geojax.errors import RunError
from geojax.transport.departures import Departures
from geojax.transport.handshake import Party, PeerRoute
from geojax.transport.link_clock import MeasuredLink
from geojax.transport.message_id import Direction
from geojax.transport.peer_link import PeerLink
from geojax.transport.peer_listener import PeerListener
from geojax.transport.protocol import (
    LostPeerError,
    MessageKey,
    PeerCounters,
    SocketFigures,
    ToldFigures,
)
from geojax.transport.sending import UrgentBytes
from geojax.transport.shards import joined, local_shapes, local_shards
from geojax.transport.streams import Streams

_HEALTH_SECONDS = 0.05
"""Between two looks at the peer while a fetch waits."""
_FAILED_SECONDS = 1.0
"""Longest wait at a bad end until the peers have heard of it."""


class Peer(NamedTuple):
    """A start of the counterpart of this process in another site."""

    name: str
    """Site, process and host, as errors show them."""
    party: Party
    address: tuple[str, int]
    there: Direction


class Limits(NamedTuple):
    """Bounds of the traffic with each peer."""

    streams: Streams
    offered_bytes: int
    """Most bytes in flight to one peer."""
    silence_seconds: float
    """A peer that gives no sign for so long counts as lost."""
    goes_on: bool = False
    """The run goes on without peers that are lost. The caller decides of silent ones."""


class CarrierTransport:
    """One process's end; `geojax.transport.protocol.Transport` documents its methods.

    Args:
        own: this start of this process, by the number of its site or stage.
        site_names: the site of each number.
        run_key: key of the run.
        listener: port at which peers open connections.
        limits: bounds of the traffic.
    """

    def __init__(
        self,
        own: Party,
        site_names: Sequence[str],
        run_key: bytes,
        listener: PeerListener,
        limits: Limits,
    ):
        self.site, self.sites = own.group, len(site_names)
        self.site_names: Sequence[str] = site_names
        self.address = listener.address
        """Address and port at which peers reach this process."""
        self._counters = {site: PeerCounters() for site in range(self.sites) if site != self.site}
        self.counters: Mapping[int, PeerCounters] = self._counters
        self.links: dict[int, PeerLink] = {}
        """The link to each peer, in its newest start."""
        self.notes: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        """Notes of peers that nobody has read, each with the peer's site."""
        self._own, self._run_key, self._listener, self._limits = own, run_key, listener, limits
        self._waits: list[str] = []
        self._closed = False
        self._departures = Departures()
        self._urgent = UrgentBytes()
        listener.serve(own)
        atexit.register(self.close, failed=True)

    def take_up(self, peer: Peer) -> None:
        """Exchange messages with a start of a peer, and with no earlier one.

        What was offered to the earlier one, or fetched from it and is not here, is lost; traffic is
        counted anew. All other links go on.
        """
        site = peer.party.group
        if (before := self.links.get(site)) is not None:
            before.close(0.0)
        counters = self._counters.setdefault(site, PeerCounters())
        vars(counters).update(vars(PeerCounters()))
        silence = self._limits.silence_seconds
        route = PeerRoute(self._run_key, self._own, peer.party, peer.address, silence)
        self.links[site] = PeerLink(
            peer.name,
            route,
            peer.there,
            self._limits.streams,
            self._limits.offered_bytes,
            counters,
            self._urgent,
            lambda note: self.notes.put((site, note)),
            self._limits.goes_on,
        )
        self._listener.expect(peer.party, self.links[site].adopt)

    def give_up(self, site: int) -> None:
        """Exchange nothing with a peer any more, which is no failure; others go on."""
        self._listener.forget(site)
        link = self.links.pop(site)
        del self._counters[site]
        # Its threads may be waiting for an answer.
        closing = threading.Thread(target=link.close, args=(0.0,), name="geojax end", daemon=True)
        closing.start()

    def note(self, receiver: int, content: bytes) -> None:
        """Send another site a note, which comes once and in order, unless the site is lost."""
        self.links[receiver].control.note(content)

    def withdraw(self, membership_id: int) -> None:
        """Withdraw offers under earlier records than this one that nobody has asked for."""
        for link in self.links.values():
            link.withdraw(membership_id)

    def offer(
        self,
        receiver: int,
        key: MessageKey,
        arrays: Sequence[jax.Array],
        *,
        yields: bool = False,
    ) -> None:
        """Offer arrays to one other site."""
        link = self.links[receiver]
        link.check()
        shards = [shard for array in arrays for shard in local_shards(array)]
        with self.waiting(f"earlier messages than {key} were not fetched by {link.name}"):
            message = link.begin_offer(key, shards, yields=yields)
        self._departures.watch(
            shards,
            functools.partial(link.depart, message),
            functools.partial(link.fail_to_depart, key),
        )

    def take_back(self, receiver: int, key: MessageKey, arrays: Sequence[jax.Array]) -> None:
        """Take back an offer that the receiver, if it is there, has not asked for."""
        if (link := self.links.get(receiver)) is not None:
            link.take_back(key, [shard for array in arrays for shard in local_shards(array)])

    def offer_held(self, receiver: int, key: MessageKey, shards: Sequence[np.ndarray]) -> None:
        """Offer shards in host memory, which yield to all messages but such ones.

        They go while this process has nothing else to send, and count nowhere: the caller bounds
        them.
        """
        link = self.links[receiver]
        link.check()
        link.depart(link.begin_offer(key, shards, yields=True), shards)

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> "_Fetch":
        """Begin to fetch what another site offers."""
        link = self.links[sender]
        link.check()
        return _Fetch(self, link, key, like)

    def check(self) -> None:
        """Raise the error of the first peer that is lost."""
        for link in self.links.values():
            link.check()

    @contextlib.contextmanager
    def waiting(self, missing: str) -> Iterator[None]:
        """Let `missing_from_peer` return `missing` while the code inside waits for a peer."""
        self._waits.append(missing)
        try:
            yield
        finally:
            self._waits.remove(missing)

    def missing_from_peer(self) -> str | None:
        """Return what a peer has not done that this process waits for; None: it does not wait."""
        waits = list(self._waits)
        return f"transport: {waits[0]}" if waits else None

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return what was measured of the link to each other site since the last call."""
        return {site: link.clock.take() for site, link in self.links.items()}

    def tell(self, receiver: int, figures: bytes) -> None:
        """Tell another site figures, soon or never."""
        self.links[receiver].control.tell(figures)

    def told(self, sender: int) -> ToldFigures | None:
        """Return the newest figures that another site has told."""
        return self.links[sender].told

    def socket_figures(self) -> Mapping[int, SocketFigures]:
        """Return how the kernel sees the link to each other site."""
        figures = {site: link.socket_figures for site, link in self.links.items()}
        return {site: own for site, own in figures.items() if own is not None}

    def drain(self) -> None:
        """Wait until the peers have fetched all offers."""
        for site, link in list(self.links.items()):
            try:
                link.drain()
            except LostPeerError:
                if not self._limits.goes_on:
                    raise
                self.give_up(site)

    def close(self, *, failed: bool = False) -> None:
        """End all transfers and connections."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        links = self.links.values()
        in_flight = sum(counters.messages_in_flight for counters in self.counters.values())
        finished = not (failed or in_flight or any(link.lost for link in links))
        silence = self._limits.silence_seconds
        deadline = time.monotonic() + (silence if finished else _FAILED_SECONDS)
        for link in links:
            link.control.say_goodbye(finished)
        for link in links:
            link.close(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        self._departures.close()


class _Fetch:
    """A message that was asked for; `geojax.transport.protocol.Fetch` documents it."""

    def __init__(
        self,
        transport: CarrierTransport,
        link: PeerLink,
        key: MessageKey,
        like: Sequence[jax.ShapeDtypeStruct],
    ):
        self.arrival: float | None = None
        self._transport, self._link, self._key, self._like = transport, link, key, like
        shapes = [local_shapes(array) for array in like]
        self._shard_counts = [len(shards) for shards in shapes]
        self._shards: list[jax.Array] = []
        self._here = threading.Event()
        link.ask(key, [shape for shards in shapes for shape in shards], self._arrived)

    def arrived(self) -> bool:
        return self._here.is_set()

    def wait(self, seconds: float) -> bool:
        return self._here.wait(seconds)

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        start = time.monotonic()
        missing = f"{self._key} did not come from {self._link.name}"
        with self._transport.waiting(missing):
            while not self.wait(_HEALTH_SECONDS):
                self._link.check()
                if timeout_seconds is not None and time.monotonic() - start > timeout_seconds:
                    raise RunError(
                        f"transport: {missing} within {timeout_seconds:g} seconds; is its "
                        "schedule the same as here?"
                    )
                if self._link.control.finished and not self.arrived():
                    raise RunError(f"transport: {self._link.name} has finished without {self._key}")
        shards = iter(self._shards)
        return [
            joined(array, list(itertools.islice(shards, count)))
            for array, count in zip(self._like, self._shard_counts, strict=True)
        ]

    def _arrived(self, shards: list[jax.Array]) -> None:
        self._shards, self.arrival = shards, time.monotonic()
        self._here.set()
