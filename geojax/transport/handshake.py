"""The handshake of every connection between processes of a run: signed, for this start and peer.

    side that listens → side that dials    a challenge
    side that dials   → side that listens  group, process, channel, number of the connection, what
                                           has come there over earlier ones, nonce, signature
    side that listens → side that dials    what has come here over earlier ones, signature

The signatures cover both challenges, the nonces of both starts and the number of the connection,
which grows: neither a stranger nor a replay opens one, and none takes the place of a later one.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from geojax.transport.tcp import dial, keep_alive

CONTROL = 0
"""Channel of control frames; those above carry messages."""
_CHALLENGE_BYTES, _MAC_BYTES = 16, 32
_HELLO = struct.Struct("!HHHQQ16s")
_COUNT = struct.Struct("!Q")
_HANDSHAKE_SECONDS = 10.0
_SIGNS = 64
"""Heartbeats, or attempts to connect, in the time after which a silent peer counts as lost."""
_MOST_STRANGERS = 64
"""Connections whose other end has not shown the key yet."""


class Refused(Exception):
    """The other end does not know the key, is not the one that was meant, or breaks a rule."""


class Party(NamedTuple):
    """One end of connections."""

    group: int
    """Number of its site, or of its stage."""
    nonce: str
    """New at every start."""
    process: int = 0
    """Index of the process in its site."""


class PeerRoute(NamedTuple):
    """Way to the port of a peer."""

    key: bytes
    own: Party
    peer: Party
    address: tuple[str, int]
    silence_seconds: float
    """Longest cut that a connection survives."""

    @property
    def retry_seconds(self) -> float:
        """Time from one heartbeat, or attempt to connect, to the next."""
        return self.silence_seconds / _SIGNS


class ChannelHello(NamedTuple):
    """Start of a connection that a peer has signed."""

    group: int
    process: int
    channel: int
    number: int
    """Number of the connection among those of its channel."""
    received: int
    """Count of frames or bytes that have come to the peer over earlier ones."""
    facts: bytes
    """All that the signatures cover."""


def open_channel(
    route: PeerRoute, channel: int, number: int, received: int, seconds: float
) -> tuple[socket.socket, int]:
    """Open a connection to a peer; return it and what has come there over earlier ones.

    Args:
        route: way to the peer.
        channel: subject of the connection.
        number: number of the connection among those of its channel, more than all before.
        received: count of frames or bytes that have come here over earlier ones.
        seconds: time to connect, and once more for the handshake.

    Raises:
        ConnectionRefusedError: nobody listens there.
        OSError: no connection, or no answer in time.
        Refused: the peer has closed it, or is not the one that was meant.
    """
    connection = dial(route.address, seconds, route.retry_seconds)
    deadline = time.monotonic() + seconds
    try:
        challenge = _receive(connection, _CHALLENGE_BYTES, deadline)
        own_challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        own = route.own
        hello = _HELLO.pack(own.group, own.process, channel, number, received, own_challenge)
        facts = _facts(own, route.peer, challenge, hello)
        connection.sendall(hello + _mac(route.key, b"open", facts))
        answer = _receive(connection, _COUNT.size + _MAC_BYTES, deadline)
        count, signature = answer[: _COUNT.size], answer[_COUNT.size :]
        if not hmac.compare_digest(signature, _mac(route.key, b"opened", facts + count)):
            raise Refused("it is of another start, or its key is another")
        keep_alive(connection, route.silence_seconds)
        return connection, _COUNT.unpack(count)[0]
    except BaseException:
        connection.close()
        raise


def read_hello(
    connection: socket.socket, key: bytes, own: Party, peers: Mapping[tuple[int, int], Party]
) -> ChannelHello:
    """Challenge whoever has connected; return what a peer says.

    Args:
        connection: of whoever it is.
        key: key of the run.
        own: this end.
        peers: the peers, by group and process.

    Raises:
        OSError: no answer in time.
        Refused: it is no peer of this start.
    """
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(challenge)
    answer = _receive(connection, _HELLO.size + _MAC_BYTES, deadline)
    hello, signature = answer[: _HELLO.size], answer[_HELLO.size :]
    group, process, channel, number, received, _ = _HELLO.unpack(hello)
    if (peer := peers.get((group, process))) is None:
        raise Refused("it is no peer")
    facts = _facts(peer, own, challenge, hello)
    if not hmac.compare_digest(signature, _mac(key, b"open", facts)):
        raise Refused("it is of another start, or its key is another")
    return ChannelHello(group, process, channel, number, received, facts)


def confirm(
    connection: socket.socket,
    key: bytes,
    hello: ChannelHello,
    received: int,
    silence_seconds: float,
) -> None:
    """Accept a connection; so many frames or bytes have come here over earlier ones."""
    count = _COUNT.pack(received)
    connection.sendall(count + _mac(key, b"opened", hello.facts + count))
    keep_alive(connection, silence_seconds)


class Handshakes:
    """Connections whose other end has not shown the key: the oldest makes room for the next.

    So strangers who connect and say nothing keep no peer out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}

    @contextlib.contextmanager
    def room_for(self, connection: socket.socket) -> Iterator[None]:
        """Count `connection` while the code inside shakes hands over it."""
        with self._lock:
            if len(self._connections) >= _MOST_STRANGERS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._connections[connection] = None
        try:
            yield
        finally:
            with self._lock:
                self._connections.pop(connection, None)


def _facts(dialing: Party, listening: Party, challenge: bytes, hello: bytes) -> bytes:
    parties = f"{dialing.group} {dialing.nonce} {listening.group} {listening.nonce} "
    return parties.encode() + challenge + hello


def _mac(key: bytes, who: bytes, facts: bytes) -> bytes:
    """Sign `facts` as the one who says them."""
    return hmac.digest(key, who + facts, "sha256")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receive so many bytes.

    Raises:
        OSError: they do not come in time.
        Refused: the other end has closed the connection.
    """
    received = b""
    while len(received) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(count - len(received))
        if not piece:
            raise Refused("it has closed the connection")
        received += piece
    return received
