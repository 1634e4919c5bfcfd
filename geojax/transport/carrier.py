"""The transport between runtimes on different hosts: messages go through host memory and TCP.

Each process exchanges its own shards with its counterparts in every other site, the processes that
hold the same ones there (`geojax.transport.link_to_site`). The receiver asks for a message, and
gets it when it is offered and computed, so that a fetch issued early costs no round trip:

    sender:   offer → computed, and asked for → pieces over the connections → acknowledged, let go
    receiver: fetch asks → pieces come → on the devices → acknowledged on the control connection

On CPUs nothing is copied but by TCP: a message is sent from the memory of its arrays, and becomes
arrays where it has come. On other devices the host holds what is offered, which the limit of bytes
in flight bounds, and what arrives.

A site that is lost ends its own link alone. When its processes have started again, `take_up`
replaces the link, and the others never notice; `give_up` goes on without it.
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

from geojax.errors import RunError
from geojax.transport.departures import Departures
from geojax.transport.handshake import Party, PeerRoute
from geojax.transport.link_clock import MeasuredLink
from geojax.transport.link_to_site import LinkToSite, ProcessLane
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
from geojax.transport.shards import HeldArray, OwnDevices, joined, local_shapes, local_shards
from geojax.transport.streams import Streams
from geojax.transport.yielding import UrgentTraffic

_HEALTH_SECONDS = 0.05
"""Between two looks at the peer while a fetch waits."""
_FAILED_SECONDS = 1.0
"""Longest wait at a bad end until the peers have heard of it."""


class Peer(NamedTuple):
    """A start of a counterpart of this process in another site."""

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
        devices: those of this process, in the order of the mesh, which it divides among several
            processes of another site; (): each of these holds what this one holds.
    """

    def __init__(
        self,
        own: Party,
        site_names: Sequence[str],
        run_key: bytes,
        listener: PeerListener,
        limits: Limits,
        devices: Sequence[jax.Device] = (),
    ):
        self.site, self.sites = own.group, len(site_names)
        self.site_names: Sequence[str] = site_names
        self.address = listener.address
        """Address and port at which peers reach this process."""
        self._counters = {site: PeerCounters() for site in range(self.sites) if site != self.site}
        self.counters: Mapping[int, PeerCounters] = self._counters
        self.links: dict[int, LinkToSite] = {}
        """The link to each site, in its newest start."""
        self.notes: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        """Notes of peers that nobody has read, each with the peer's site."""
        self._devices = tuple(devices)
        self._own, self._run_key, self._listener, self._limits = own, run_key, listener, limits
        self._waits: list[str] = []
        self._closed = False
        self._departures = Departures()
        self._urgent = UrgentTraffic()
        listener.serve(own)
        atexit.register(self.close, failed=True)

    def take_up(self, peers: Sequence[Peer]) -> None:
        """Exchange messages with a start of a site, and with no earlier one.

        What was offered to the earlier one, or fetched from it and is not here, is lost; traffic is
        counted anew. All other links go on.

        Args:
            peers: the counterparts of this process in that site.
        """
        site = peers[0].party.group
        if (before := self.links.get(site)) is not None:
            before.close(0.0)
        counters = self._counters.setdefault(site, PeerCounters())
        vars(counters).update(vars(PeerCounters()))
        limits = self._limits
        lanes = [
            PeerLink(
                peer.name,
                PeerRoute(
                    self._run_key, self._own, peer.party, peer.address, limits.silence_seconds
                ),
                peer.there,
                limits.streams,
                limits.offered_bytes // len(peers),
                counters,
                self._urgent,
                lambda note: self.notes.put((site, note)),
                limits.goes_on,
            )
            for peer in peers
        ]
        self.links[site] = LinkToSite(list(map(ProcessLane, lanes, self._divided(len(peers)))))
        for peer, lane in zip(peers, lanes, strict=True):
            self._listener.expect(peer.party, lane.adopt)

    def _divided(self, lanes: int) -> list[OwnDevices]:
        """Divide the devices of this process among the lanes to a site."""
        if lanes == 1 or not self._devices:
            return [None] * lanes
        count, rest = divmod(len(self._devices), lanes)
        assert not rest, "sites have equally many devices"
        starts = range(0, len(self._devices), count)
        return [frozenset(self._devices[start : start + count]) for start in starts]

    def give_up(self, site: int) -> None:
        """Exchange nothing with a site any more, which is no failure; others go on."""
        self._listener.forget(site)
        link = self.links.pop(site)
        del self._counters[site]
        # Its threads may be waiting for an answer.
        closing = threading.Thread(target=link.close, args=(0.0,), name="geojax end", daemon=True)
        closing.start()

    def note(self, receiver: int, content: bytes) -> None:
        """Send another site a note, which comes once and in order, unless the site is lost."""
        self.links[receiver].note(content)

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
        self.links[receiver].check()
        for link, devices in self.links[receiver].lanes:
            shards = _shards_on(arrays, devices)
            with self.waiting(f"earlier messages than {key} were not fetched by {link.name}"):
                message = link.begin_offer(key, shards, yields=yields)
            self._departures.watch(
                shards,
                functools.partial(link.depart, message),
                functools.partial(link.fail_to_depart, key),
            )

    def take_back(self, receiver: int, key: MessageKey, arrays: Sequence[jax.Array]) -> None:
        """Take back an offer that the receiver, if it is there, has not asked for."""
        if (site_link := self.links.get(receiver)) is not None:
            for link, devices in site_link.lanes:
                link.take_back(key, _shards_on(arrays, devices))

    def offer_held(self, receiver: int, key: MessageKey, held: HeldArray) -> None:
        """Offer an array in host memory, which yields to all messages but such ones.

        It goes while this process has nothing else to send, and counts nowhere: the caller bounds
        such messages.
        """
        self.links[receiver].check()
        for link, devices in self.links[receiver].lanes:
            shards = held.shards(devices)
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
        return {site: link.measured() for site, link in self.links.items()}

    def tell(self, receiver: int, figures: bytes) -> None:
        """Tell another site figures, soon or never."""
        self.links[receiver].tell(figures)

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
        finished = not (failed or in_flight or any(link.is_lost for link in links))
        silence = self._limits.silence_seconds
        deadline = time.monotonic() + (silence if finished else _FAILED_SECONDS)
        for link in links:
            link.say_goodbye(finished)
        for link in links:
            link.close(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        self._departures.close()


def _shards_on(arrays: Sequence[jax.Array], devices: OwnDevices) -> list[jax.Array]:
    return [shard for array in arrays for shard in local_shards(array, devices)]


class _Fetch:
    """A message that was asked for; `geojax.transport.protocol.Fetch` documents it."""

    def __init__(
        self,
        transport: CarrierTransport,
        link: LinkToSite,
        key: MessageKey,
        like: Sequence[jax.ShapeDtypeStruct],
    ):
        self.arrival: float | None = None
        self._transport, self._link, self._key, self._like = transport, link, key, like
        self._parts: dict[int, list[jax.Array]] = {}
        """The shards that have come over each lane."""
        self._counts: list[list[int]] = []
        """The number of shards of each array over each lane."""
        self._here = threading.Event()
        for number, (lane, devices) in enumerate(link.lanes):
            shapes = [local_shapes(array, devices) for array in like]
            self._counts.append(list(map(len, shapes)))
            flat = [shape for shards in shapes for shape in shards]
            lane.ask(key, flat, functools.partial(self._arrived, number))

    def arrived(self) -> bool:
        return self._here.is_set()

    def wait(self, seconds: float) -> bool:
        return self._here.wait(seconds)

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        start = time.monotonic()
        missing = f"{self._key} did not come from {self._late[0].name}" if self._late else ""
        with self._transport.waiting(missing):
            while not self.wait(_HEALTH_SECONDS):
                self._link.check()
                if timeout_seconds is not None and time.monotonic() - start > timeout_seconds:
                    raise RunError(
                        f"transport: {missing} within {timeout_seconds:g} seconds; is its "
                        "schedule the same as here?"
                    )
                for late in self._late:
                    if late.control.finished and late in self._late:  # it may have come meanwhile
                        raise RunError(f"transport: {late.name} has finished without {self._key}")
        of_arrays: list[list[tuple[OwnDevices, list[jax.Array]]]] = [[] for _ in self._like]
        for number, (_, devices) in enumerate(self._link.lanes):
            shards = iter(self._parts[number])
            for of_array, count in zip(of_arrays, self._counts[number], strict=True):
                of_array.append((devices, list(itertools.islice(shards, count))))
        return list(map(joined, self._like, of_arrays))

    @property
    def _late(self) -> list[PeerLink]:
        """The lanes over which the message has not come."""
        lanes = enumerate(self._link.lanes)
        return [lane.link for number, lane in lanes if number not in self._parts]

    def _arrived(self, lane: int, shards: list[jax.Array]) -> None:
        self._parts[lane] = shards
        if len(self._parts) == len(self._link.lanes):
            self.arrival = time.monotonic()
            self._here.set()
