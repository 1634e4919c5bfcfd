"""The transport between runtimes on different hosts: JAX's transfer engine behind guards.

Each process exchanges its own shards with its counterpart, the process of the same index, in every
other site. The receiver pulls: a fetch asks the sender's engine at once, which answers when the
message is offered and computed, so that a fetch issued early costs no round trip.

    sender:   offer → engine holds the arrays until they are pulled; bytes count until acknowledged
    receiver: fetch → engine pulls → arrived → acknowledgment on the control connection

A thread waits in XLA for each fetch (`geojax.transport.arrivals`). `close` makes those fail that
are under way, also where Python ends without it.
"""

import atexit
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from geojax.errors import RunError
from geojax.transport import private
from geojax.transport.arrivals import Arrivals
from geojax.transport.control import ControlConnection
from geojax.transport.control_listener import ControlListener
from geojax.transport.guard_process import GuardProcess
from geojax.transport.in_flight import InFlight
from geojax.transport.link_clock import Departures, LinkClock, MeasuredLink
from geojax.transport.message_id import Direction, message_id
from geojax.transport.protocol import MessageKey, PeerCounters
from geojax.transport.shards import joined, local_shapes, local_shards

_HEALTH_SECONDS = 0.05
"""Between two looks at the peers while a fetch waits."""
_CAUSE_SECONDS = 1.0
"""Longest wait of a failed pull for the end of the peer or of the guard, which says more."""
_FAILED_SECONDS = 1.0
"""Longest wait at a bad end until the peers have heard of it."""


class Peer(NamedTuple):
    """The counterpart of this process in another site."""

    name: str
    """Site, process and host, as errors show them."""
    control: ControlConnection
    """Control connections with it."""
    engine: Any
    """JAX's connection to the peer's transfer server."""
    there: Direction
    back: Direction


class _Link:
    """State of the traffic with one peer."""

    def __init__(
        self, peer: Peer, counters: PeerCounters, limit_bytes: int, check: Callable[[], None]
    ):
        self.peer, self.counters = peer, counters
        self.in_flight = InFlight(peer.name, limit_bytes, counters, check)
        self.offered: dict[int, int] = {}
        """Bytes of each message that is offered and not acknowledged."""
        self.failure: str | None = None
        """The first pull that failed, and why: after it others may wait for ever."""
        self.clock = LinkClock()
        self.control = peer.control
        self.control.acknowledged, self.control.echoed = self._acknowledged, self.clock.echoed

    def _acknowledged(self, message: int) -> None:
        if (size := self.offered.pop(message, None)) is not None:
            self.clock.acknowledged(message, size)
            self.in_flight.acknowledge(size)


class EngineTransport:
    """One process's end; `geojax.transport.protocol.Transport` documents its methods.

    Args:
        site: number of this site, or of its stage among those of all sites.
        site_names: the site of each number.
        run_key: key of the run.
        server: JAX's transfer server of this process.
        guard: guard of its ports.
        listener: port of its control connections.
        peers: counterparts of this process, by site.
        limit_bytes: most bytes in flight to one peer.
        silence_seconds: a peer that gives no sign for so long counts as lost.
    """

    def __init__(
        self,
        site: int,
        site_names: Sequence[str],
        run_key: bytes,
        server: Any,
        guard: GuardProcess,
        listener: ControlListener,
        peers: Mapping[int, Peer],
        limit_bytes: int,
        silence_seconds: float,
    ):
        self.site, self.sites, self.site_names = site, len(site_names), site_names
        self.guard_address = guard.address
        """Address and port at which peers reach this process."""
        self.counters: Mapping[int, PeerCounters] = {each: PeerCounters() for each in peers}
        self._run_key, self._server = run_key, server
        self._guard, self._listener = guard, listener
        self._silence_seconds = silence_seconds
        self._lost: str | None = None
        self._waits: list[str] = []
        self._closed = False
        self._arrivals, self._departures = Arrivals(), Departures()
        self._links = {
            each: _Link(
                peer,
                self.counters[each],
                limit_bytes,
                functools.partial(self._check_receiver, each),
            )
            for each, peer in peers.items()
        }
        atexit.register(self.close, failed=True)

    def offer(self, receiver: int, key: MessageKey, arrays: Sequence[jax.Array]) -> None:
        """Offer arrays to one other site."""
        self.check()
        link = self._links[receiver]
        shards = [shard for array in arrays for shard in local_shards(array)]
        message = message_id(self._run_key, link.peer.there, key, shards)
        assert message not in link.offered, f"{key} is offered to {link.peer.name} once"
        size = sum(shard.nbytes for shard in shards)
        with self.waiting(f"earlier messages than {key} were not fetched by {link.peer.name}"):
            link.in_flight.add(key, size)
        link.offered[message] = size
        self._server.await_pull(message, shards)
        self._departures.watch(
            shards,
            lambda: message in link.offered,
            functools.partial(link.clock.departed, message),
        )

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> "_Fetch":
        """Begin to fetch what another site offers."""
        self.check()
        link = self._links[sender]
        wanted = [local_shapes(each) for each in like]
        flat = [shape for shapes in wanted for shape in shapes]
        message = message_id(self._run_key, link.peer.back, key, flat)
        shards = link.peer.engine.pull(message, flat)
        fetch = _Fetch(self, link, key, message, shards, like, [len(each) for each in wanted])
        self._arrivals.begin(fetch.wait_in_xla)
        return fetch

    def check(self) -> None:
        """Raise the error of the first peer that is lost."""
        for link in self._links.values():
            if self._lost is None and (problem := self._problem(link)):
                self._lost = problem
                private.forget(self._server, [each.peer.engine for each in self._links.values()])
        if self._lost is not None:
            raise RunError(f"transport: {self._lost}; restart the run from its last checkpoint")

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
        return {site: link.clock.take() for site, link in self._links.items()}

    def drain(self) -> None:
        """Wait until the peers have fetched all offers."""
        for link in self._links.values():
            link.in_flight.wait_until_empty()

    def close(self, *, failed: bool = False) -> None:
        """End all transfers, the control connections and the guard."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        in_flight = sum(each.messages_in_flight for each in self.counters.values())
        finished = not failed and self._lost is None and not in_flight
        deadline = time.monotonic() + (self._silence_seconds if finished else _FAILED_SECONDS)
        for link in self._links.values():
            link.control.say_goodbye(finished)
        for link in self._links.values():
            link.control.close(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        private.forget(self._server, [each.peer.engine for each in self._links.values()])
        # Pulls over a link that is cut fail when the guard ends their connections, not before.
        self._guard.close()
        self._arrivals.close()
        self._departures.close()

    def await_cause(self, link: _Link) -> None:
        """Wait for what may have broken a pull: the end of the peer or of the guard."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while time.monotonic() < deadline and not self._guard.ended.is_set():
            if link.control.over.wait(_HEALTH_SECONDS):
                return

    def _check_receiver(self, receiver: int) -> None:
        """Raise an error if a site will not fetch what it has been offered."""
        self.check()
        link = self._links[receiver]
        if link.control.finished and (left := link.counters.messages_in_flight):
            raise RunError(
                f"transport: {link.peer.name} has finished without fetching {left} messages; is "
                "its schedule the same as here?"
            )

    def _problem(self, link: _Link) -> str | None:
        """Return why a peer is lost; None if it is not."""
        if (ended := self._guard.failure) is not None:
            return f"{ended}, and with it the connections to other sites"
        control = link.control
        if control.finished:
            return None
        if control.lost is not None:
            return f"lost the connection to {link.peer.name}: {control.lost}"
        if link.failure is not None:
            return link.failure
        if (silent := control.silent_seconds) > self._silence_seconds:
            why = "" if control.problem is None else f" ({control.problem})"
            return f"{link.peer.name} has been silent for {silent:.0f} seconds{why}"
        return None


class _Fetch:
    """A pull; `geojax.transport.protocol.Fetch` documents it."""

    def __init__(
        self,
        transport: EngineTransport,
        link: _Link,
        key: MessageKey,
        message: int,
        shards: Sequence[jax.Array],
        like: Sequence[jax.ShapeDtypeStruct],
        shard_counts: Sequence[int],
    ):
        self.arrival: float | None = None
        self._transport, self._link, self._key, self._message = transport, link, key, message
        self._shards, self._like, self._shard_counts = shards, like, shard_counts
        self._here = threading.Event()

    def arrived(self) -> bool:
        return self._here.is_set()

    def wait(self, seconds: float) -> bool:
        return self._here.wait(seconds)

    def wait_in_xla(self) -> None:
        """Wait for the arrays; count and acknowledge them."""
        error = private.pull_error(self._shards)
        if error is None:
            self.arrival = time.monotonic()
            self._link.control.acknowledge(self._message)
        else:
            self._transport.await_cause(self._link)
            if self._link.failure is None:
                self._link.failure = f"lost {self._key} from {self._link.peer.name} ({error})"
        self._here.set()

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        start = time.monotonic()
        peer = self._link.peer.name
        missing = f"{self._key} did not come from {peer}"
        with self._transport.waiting(missing):
            while not self.wait(_HEALTH_SECONDS) or self.arrival is None:
                self._transport.check()
                if timeout_seconds is not None and time.monotonic() - start > timeout_seconds:
                    raise RunError(
                        f"transport: {missing} within {timeout_seconds:g} seconds; is its "
                        "schedule the same as here?"
                    )
                if self._link.control.finished and self.arrival is None:
                    raise RunError(f"transport: {peer} has finished without {self._key}")
        shards = iter(self._shards)
        return [
            joined(each, list(itertools.islice(shards, count)))
            for each, count in zip(self._like, self._shard_counts, strict=True)
        ]
