"""The handshake of a control connection: signed, for this start, this peer and this connection.

    side that listens → side that dials    a challenge
    side that dials   → side that listens  group, number of the connection, nonce, signature
    side that listens → side that dials    number of frames that have come so far, signature

The signatures cover both challenges, the nonces of both starts and the number of the connection,
which grows: neither a stranger nor a replay opens one, and none takes the place of a later one.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import NamedTuple

from geojax.transport.guard import HANDSHAKE_SECONDS, MAC_BYTES, Refused, dial, mac, receive

_CHALLENGE_BYTES = 16
_HELLO = struct.Struct("!HQ16s")
_COUNT = struct.Struct("!Q")


class Party(NamedTuple):
    """One end of control connections."""

    group: int
    """Number of its site, or of its stage."""
    nonce: str
    """New at every start."""


class PeerRoute(NamedTuple):
    """Way to the control port of a peer."""

    key: bytes
    own: Party
    peer: Party
    address: tuple[str, int]
    """Address of the peer's guard; that of the control port itself in the same network."""
    guarded_port: int | None
    """Control port behind the guard; None: there is no guard between."""


class ControlHello(NamedTuple):
    """Start of a connection that a peer has signed."""

    group: int
    number: int
    """Number of the connection."""
    facts: bytes
    """All that the signatures cover."""


def open_control(route: PeerRoute, number: int, seconds: float) -> tuple[socket.socket, int]:
    """Open connection `number` to a peer; return it and the frames that have come there so far.

    Raises:
        ConnectionRefusedError: nobody listens there.
        OSError: no connection, or no answer in time.
        Refused: the peer has closed it, or is not the one that was meant.
    """
    deadline = time.monotonic() + seconds
    if route.guarded_port is None:
        connection = socket.create_connection(route.address, seconds)
    else:
        connection = dial(route.address, route.key, route.guarded_port, seconds)
    try:
        challenge = receive(connection, _CHALLENGE_BYTES, deadline)
        hello = _HELLO.pack(route.own.group, number, secrets.token_bytes(16))
        facts = _facts(route.own, route.peer, challenge, hello)
        connection.sendall(hello + mac(route.key, b"open", facts))
        answer = receive(connection, _COUNT.size + MAC_BYTES, deadline)
        count, signature = answer[: _COUNT.size], answer[_COUNT.size :]
        if not hmac.compare_digest(signature, mac(route.key, b"opened", facts + count)):
            raise Refused("it is of another start, or its key is another")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, _COUNT.unpack(count)[0]
    except BaseException:
        connection.close()
        raise


def read_hello(
    connection: socket.socket, key: bytes, own: Party, peers: Mapping[int, Party]
) -> ControlHello:
    """Challenge whoever has connected; return what a peer says.

    Raises:
        OSError: no answer in time.
        Refused: it is no peer of this start.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    challenge = secrets.token_bytes(_CHALLENGE_BYTES)
    connection.sendall(challenge)
    answer = receive(connection, _HELLO.size + MAC_BYTES, deadline)
    hello, signature = answer[: _HELLO.size], answer[_HELLO.size :]
    group, number, _ = _HELLO.unpack(hello)
    if group not in peers:
        raise Refused("it is no peer")
    facts = _facts(peers[group], own, challenge, hello)
    if not hmac.compare_digest(signature, mac(key, b"open", facts)):
        raise Refused("it is of another start, or its key is another")
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ControlHello(group, number, facts)


def confirm(connection: socket.socket, key: bytes, hello: ControlHello, frames: int) -> None:
    """Accept a connection; `frames` have come over earlier ones."""
    count = _COUNT.pack(frames)
    connection.sendall(count + mac(key, b"opened", hello.facts + count))


def _facts(dialing: Party, listening: Party, challenge: bytes, hello: bytes) -> bytes:
    parties = f"{dialing.group} {dialing.nonce} {listening.group} {listening.nonce} "
    return parties.encode() + challenge + hello
