"""TCP between sites: ports, and connections that survive an idle time and a short cut."""

import contextlib
import errno
import itertools
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple

from geojax.transport.protocol import SocketFigures

_PORT_SECONDS = 5.0
"""A port that is asked for may be that of an earlier run, which is about to end."""
_PAUSE_SECONDS = 0.3
_PROBE_SECONDS = 15
"""Between two probes of a connection over which nothing goes."""
# Longest time between two transmissions of a packet, and the option's number, of Linux 6.15 and
# later. Without it the time doubles: a link that returns after 26 s is not used until 51 s.
_TCP_RTO_MAX_MS, _RTO_MAX_MS = 44, 1000
_TCP_INFO = struct.Struct("=16xI4xI40xI28xI40xII8xQ")
"""The fields of `TcpCounts` in Linux's tcp_info."""
# Without that option a packet is sent again within twice the time for which its link was cut.
_LONGEST_BACKOFF = 2


def listen(address: tuple[str, int]) -> socket.socket:
    """Listen at an address; port 0 is any.

    Raises:
        OSError: it is not an address of this host, or its port is taken.
    """
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    deadline = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def dial(address: tuple[str, int], seconds: float, pause: float) -> socket.socket:
    """Connect to an address within `seconds`; after each `pause` begin one more attempt.

    After a cut a single attempt takes long: TCP sends its packet again after a second or more.

    Raises:
        ConnectionRefusedError: nobody listens there.
        OSError: no connection in time, or no way to the address.
    """
    deadline = time.monotonic() + seconds
    targets = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    attempts = selectors.DefaultSelector()
    try:
        for turn in itertools.count():
            target = targets[turn % len(targets)]
            attempt = socket.socket(*target[:3])
            attempts.register(attempt, selectors.EVENT_WRITE, (attempt, target))
            attempt.setblocking(False)
            attempt.connect_ex(target[4])
            left = deadline - time.monotonic()
            for key, _ in attempts.select(max(0.0, min(pause, left))):
                attempt, target = key.data
                attempts.unregister(attempt)
                if not (problem := attempt.connect_ex(target[4])):  # says how it has ended
                    attempt.settimeout(seconds)
                    return attempt
                attempt.close()
                targets = [other for other in targets if other != target]
                if not targets:
                    raise OSError(problem, os.strerror(problem))
            if left <= 0:
                break
        raise TimeoutError("timed out")
    finally:
        for key in attempts.get_map().values():
            key.data[0].close()
        attempts.close()


def serve(listener: socket.socket, act: Callable[[socket.socket], None]) -> None:
    """Call `act` with each connection that `listener` accepts, in a thread, until it is closed."""

    def accept() -> None:
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
            except OSError:  # gone before it was accepted, no files left for now, or closed
                time.sleep(0.05)
                continue
            threading.Thread(
                target=act, args=(connection,), name="geojax handshake", daemon=True
            ).start()

    threading.Thread(target=accept, name="geojax port", daemon=True).start()


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Let calls on a connection block, and the connection survive cuts of up to `seconds`.

    It is probed while it is idle: firewalls forget connections that have been idle for some
    minutes, as those of a run are that compiles, and a host that has lost one says so only if it is
    asked.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    # A packet that nobody acknowledges ends the connection only when a cut of `seconds` is over and
    # the packet has been sent again since. The control connection ends the run before.
    patience = int(1e3 * (_LONGEST_BACKOFF * seconds + _PROBE_SECONDS))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
    with contextlib.suppress(OSError):  # an older kernel
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)


class TcpCounts(NamedTuple):
    """A connection as the kernel counts it."""

    segment_bytes: int = 0
    segments_in_flight: int = 0
    microseconds: int = 0
    """Smoothed round trip."""
    retransmits: int = 0
    unsent_bytes: int = 0
    least_microseconds: int = 0
    """Shortest round trip of the last minutes: without queues on the way."""
    bytes_per_second: int = 0
    """Rate at which bytes were acknowledged, when there were enough of them."""


def tcp_counts(connection: socket.socket) -> TcpCounts | None:
    """Return what the kernel counts; None: nothing, or the connection has ended."""
    with contextlib.suppress(OSError, struct.error):  # an older kernel counts less
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        return TcpCounts(*_TCP_INFO.unpack(facts))
    return None


class SocketMeter:
    """Figures of the connections to a peer, as the kernel counts them for each."""

    def __init__(self) -> None:
        self._counted: weakref.WeakKeyDictionary[socket.socket, int] = weakref.WeakKeyDictionary()

    def read(self, connections: Iterable[socket.socket]) -> SocketFigures | None:
        """Return the figures since the last call; None: the kernel counts nothing."""
        trips, retransmits = [], 0
        for connection in connections:
            if (counts := tcp_counts(connection)) is not None:
                trips.append(counts.microseconds / 1e6)
                retransmits += counts.retransmits - self._counted.get(connection, 0)
                self._counted[connection] = counts.retransmits
        return SocketFigures(min(trips), retransmits) if trips else None


def shut(connection: socket.socket) -> None:
    """Wake whoever reads from a connection or writes to it, and let them find its end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
