"""The traffic with one peer in one of its starts, with a state of its own."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from geojax.transport.control import ControlConnection
from geojax.transport.handshake import CONTROL, ChannelHello, PeerRoute, Refused
from geojax.transport.host_memory import bytes_of
from geojax.transport.in_flight import InFlight
from geojax.transport.link_clock import LinkClock
from geojax.transport.message_id import Direction, message_id
from geojax.transport.protocol import (
    LostPeerError,
    MessageKey,
    PeerCounters,
    SocketFigures,
    ToldFigures,
)
from geojax.transport.receiving import Arriving, Inbox, IncomingChannel
from geojax.transport.sending import Outbox, OutgoingChannel
from geojax.transport.streams import MOST_STREAMS, Streams
from geojax.transport.tcp import SocketMeter
from geojax.transport.yielding import UrgentTraffic


class _Offered(NamedTuple):
    """A message that is offered and not acknowledged."""

    size: int
    membership_id: int
    is_counted: bool
    """It counts among the bytes in flight, whose limit it keeps."""


class PeerLink:
    """Control connections, offers and fetches of one peer.

    The link opens a channel for each stream of what it fetches. The peer does so for what it
    fetches, and chooses their number.

    Args:
        name: site, process and host of the peer, as errors show them.
        route: way to the peer.
        there: direction of the offers.
        streams: connections that bring what is fetched.
        limit_bytes: most bytes in flight to the peer.
        counters: counters of the peer.
        urgent: traffic of all links of the process for which messages that yield wait.
        noted: called with each note of the peer.
        waits_for_silent: a peer that is silent does not count as lost.
    """

    def __init__(
        self,
        name: str,
        route: PeerRoute,
        there: Direction,
        streams: Streams,
        limit_bytes: int,
        counters: PeerCounters,
        urgent: UrgentTraffic,
        noted: Callable[[bytes], None] = lambda note: None,
        waits_for_silent: bool = False,
    ):
        self.name = name
        self.lost: str | None = None
        """Reason why the peer is lost; None: it is not."""
        self.clock = LinkClock()
        self._meter = SocketMeter()
        self.told: ToldFigures | None = None
        """The newest figures that the peer told; None: there are none."""
        self._route, self._there = route, there
        self._failure: str | None = None
        self._waits_for_silent = waits_for_silent
        self._offered: dict[int, _Offered] = {}
        self._in_flight = InFlight(name, limit_bytes, counters, self._check_receiver)
        self._outbox, self._inbox = Outbox(streams.piece_bytes, urgent), Inbox()
        self._adopting = threading.Lock()
        self._outgoing: dict[int, OutgoingChannel] = {}
        self.control = ControlConnection(route)
        self.control.echoed, self.control.asked = self.clock.echoed, self._outbox.ask
        self.control.acknowledged, self.control.reopened = self._acknowledged, self._open_anew
        self.control.told, self.control.noted = self._heard_figures, noted
        self._incoming = [
            IncomingChannel(
                channel, route, self._inbox, self.control.over, self.control.hear, self._fail
            )
            for channel in range(1, 1 + streams.connections)
        ]

    def adopt(self, connection: socket.socket, hello: ChannelHello) -> None:
        """Take a connection that the peer has opened.

        Raises:
            Refused: it is none of this link, or there is a later one.
            OSError: it has ended.
        """
        if hello.channel == CONTROL:
            return self.control.adopt(connection, hello)
        if hello.channel > MOST_STREAMS:
            raise Refused("there is no such channel")
        with self._adopting:
            if self.lost is not None:
                raise Refused("the link is over")
            if hello.channel not in self._outgoing:
                self._outgoing[hello.channel] = OutgoingChannel(self._outbox, self._route)
        self._outgoing[hello.channel].adopt(connection, hello)

    def begin_offer(
        self,
        key: MessageKey,
        shards: Sequence[jax.Array] | Sequence[np.ndarray],
        *,
        yields: bool = False,
    ) -> int:
        """Wait until a message fits; return its identifier, under which it is to depart.

        One that yields needs no room: its bytes do not count.

        Raises:
            UserError: it can never fit.
            RunError: the peer is lost.
        """
        message = message_id(self._route.key, self._there, key, shards)
        assert message not in self._offered, f"{key} is offered to {self.name} once"
        size = sum(shard.nbytes for shard in shards)
        if not yields:
            self._in_flight.add(key, size)
        self._offered[message] = _Offered(size, key.membership_id, not yields)
        return message

    def depart(self, message: int, shards: Sequence[jax.Array] | Sequence[np.ndarray]) -> None:
        """Send a message, which is computed, as soon as the peer asks for it."""
        if self.lost is None and (offered := self._offered.get(message)) is not None:
            if offered.is_counted:
                self.clock.departed(message)
            self._outbox.computed(message, bytes_of(shards), yields=not offered.is_counted)

    def fail_to_depart(self, key: MessageKey, reason: str) -> None:
        """Note that a message will never be computed."""
        self._failure = self._failure or f"cannot send {key} to {self.name}: {reason}"

    def withdraw(self, membership_id: int) -> None:
        """Withdraw the offers under earlier records that the peer has not asked for."""
        for message, offered in list(self._offered.items()):
            if 0 < offered.membership_id < membership_id and self._outbox.withdraw(message):
                self._settle(message)

    def take_back(self, key: MessageKey, shards: Sequence[jax.Array]) -> None:
        """Take back an offer, unless the peer has asked for it."""
        message = message_id(self._route.key, self._there, key, shards)
        if message in self._offered and self._outbox.withdraw(message):
            self._settle(message)

    def ask(
        self,
        key: MessageKey,
        shapes: Sequence[jax.ShapeDtypeStruct],
        arrived: Callable[[list[jax.Array]], None],
    ) -> None:
        """Ask the peer for a message.

        Args:
            key: name of the message.
            shapes: shape, dtype and device of each shard.
            arrived: called with the shards when they are on their devices.
        """
        message = message_id(self._route.key, self._there.back, key, shapes)

        def acknowledge(shards: list[jax.Array]) -> None:
            arrived(shards)
            self.control.acknowledge(message)

        self._inbox.expect(message, Arriving(shapes, acknowledge))
        self.control.ask(message)

    @property
    def socket_figures(self) -> SocketFigures | None:
        """The link as the kernel counts it; None: there is no connection now."""
        with self._adopting:
            outgoing = list(self._outgoing.values())
        sockets = [socket for channel in outgoing for socket in channel.sockets]
        return self._meter.read([*self.control.sockets, *sockets])

    def check(self) -> None:
        """Let go of what the peer was offered if it is lost.

        Raises:
            LostPeerError: it is lost.
        """
        if self.lost is None and (problem := self._problem()):
            self.lost = problem
            self._let_go()
        if self.lost is not None:
            raise LostPeerError(f"transport: {self.lost}; restart the run from its last checkpoint")

    def drain(self) -> None:
        """Wait until the peer has fetched all offers."""
        self._in_flight.wait_until_empty()

    def close(self, seconds: float) -> None:
        """End all connections and threads; wait at most so long for the peer to hear a goodbye."""
        self.control.close(seconds)
        self.lost = self.lost or f"the link to {self.name} is closed"
        self._let_go()
        for channel in self._channels:
            channel.close()

    @property
    def _channels(self) -> list[IncomingChannel | OutgoingChannel]:
        with self._adopting:
            return [*self._incoming, *self._outgoing.values()]

    def _check_receiver(self) -> None:
        self.check()
        if self.control.finished and self._offered:
            raise LostPeerError(
                f"transport: {self.name} has finished without fetching {len(self._offered)} "
                "messages; is its schedule the same as here?"
            )

    def _acknowledged(self, message: int) -> None:
        if (offered := self._offered.get(message)) is not None:
            if offered.is_counted:
                self.clock.acknowledged(message, offered.size)
            self._outbox.forget(message)
            self._settle(message)

    def _settle(self, message: int) -> None:
        offered = self._offered.pop(message, None)
        if offered is not None and offered.is_counted:
            self._in_flight.acknowledge(offered.size)

    def _heard_figures(self, content: bytes) -> None:
        self.told = ToldFigures(content, time.monotonic())

    def _open_anew(self) -> None:
        """Open the channels anew: the link was cut, and TCP would try again later and later."""
        for channel in self._incoming:
            channel.open_anew()

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or f"lost a message from {self.name}: {reason}"

    def _let_go(self) -> None:
        for channel in self._channels:
            channel.stop()
        self._outbox.close()
        self._inbox.close()

    def _problem(self) -> str | None:
        """Return why the peer is lost; None if it is not."""
        if self._failure is not None:
            return self._failure
        control = self.control
        if control.finished:
            return None
        if control.lost is not None:
            return f"lost the connection to {self.name}: {control.lost}"
        silent = control.silent_seconds
        if silent > self._route.silence_seconds and not self._waits_for_silent:
            why = "" if control.problem is None else f" ({control.problem})"
            return f"{self.name} has been silent for {silent:.0f} seconds{why}"
        return None
