"""Round trip and throughput between two processes, over TCP sockets of their own.

One end listens on its own address, the other connects; every connection begins with a token that
both know, so that strangers are ignored. Then

    round trip   the caller sends a byte and waits for its answer, many times
    throughput   over fresh streams, one direction at a time: the sender sends as fast as it can,
                 the receiver counts once TCP has found its rate, and closes
"""

import contextlib
import hmac
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence

from geojax.errors import RunError

TIMEOUT_SECONDS = 30.0
"""Time that a socket may transfer nothing."""

_EXCHANGES = 60
_FIRST_EXCHANGES = 5
_EXCHANGE_SECONDS = 4.0
_PIECE = 2**19
_SLICES = 12
_TCP_INFO_OPTIONS, _TCP_TIMESTAMPS = 5, 1  # linux/tcp.h: the place in struct tcp_info, and its bit


def own_address(host: str) -> str:
    """Return the address of this machine that faces `host`, a name or an address.

    Raises:
        RunError: there is no route to it.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            found: str = probe.getsockname()[0]
            return found
    except OSError as error:
        raise RunError(f"no address of this host faces the coordinator {host}: {error}") from None


class Listener:
    """The end that accepts connections."""

    def __init__(self, address: str, token: bytes, peer: str):
        """Listen on a free port of `address`; `peer` names the other end in messages."""
        self._token, self._peer = token, peer
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def accept(self) -> socket.socket:
        """Accept the next connection that sends the token.

        Raises:
            RunError: none arrives in time.
        """
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (remaining := deadline - time.monotonic()) > 0:
            self._socket.settimeout(remaining)
            with contextlib.suppress(OSError):
                connection = self._socket.accept()[0]
                _prepare(connection)
                if hmac.compare_digest(_receive(connection, len(self._token)), self._token):
                    return connection
                connection.close()
        raise RunError(f"{self._peer} did not connect within {TIMEOUT_SECONDS:g} seconds")


def call(source: str, address: tuple[str, int], token: bytes, peer: str) -> socket.socket:
    """Connect from this host's address `source` to the `Listener` at `address`.

    Raises:
        RunError: it does not answer; the message names it by `peer`.
    """
    try:
        connection = socket.create_connection(address, TIMEOUT_SECONDS, (source, 0))
        _prepare(connection)
        connection.sendall(token)
        return connection
    except OSError as error:
        raise RunError(f"{peer} cannot be reached at {address[0]}: {error}") from None


def round_trip(connection: socket.socket, peer: str) -> float:
    """Measure the median time of a byte and its answer, in seconds; the other end calls `answer`.

    Raises:
        RunError: `peer` does not answer.
    """
    times: list[float] = []
    begun = time.perf_counter()
    try:
        while len(times) < _EXCHANGES and time.perf_counter() - begun < _EXCHANGE_SECONDS:
            start = time.perf_counter()
            connection.sendall(b"?")
            _receive(connection, 1)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[_FIRST_EXCHANGES:] or times)
        connection.sendall(b"." + struct.pack("!d", seconds))
    except OSError as error:
        raise RunError(f"{peer} does not answer: {error}") from None
    return seconds


def answer(connection: socket.socket, peer: str) -> float:
    """Answer until the other end's `round_trip` is over, and return its result.

    Raises:
        RunError: `peer` does not ask.
    """
    try:
        while _receive(connection, 1) == b"?":
            connection.sendall(b"!")
        seconds: float = struct.unpack("!d", _receive(connection, 8))[0]
        return seconds
    except OSError as error:
        raise RunError(f"{peer} does not ask any more: {error}") from None


def send(connections: Sequence[socket.socket], peer: str) -> None:
    """Fill the connections until `peer` closes them.

    Raises:
        RunError: it receives nothing for a long time.
    """
    stuck: list[socket.socket] = []

    def fill(connection: socket.socket) -> None:
        piece = bytes(_PIECE)
        try:
            while True:
                connection.sendall(piece)
        except TimeoutError:
            stuck.append(connection)
        except OSError:
            pass  # the other end has counted enough

    with _threads([threading.Thread(target=fill, args=(each,)) for each in connections]):
        pass
    if stuck:
        raise RunError(f"{peer} took nothing for {TIMEOUT_SECONDS:g} seconds: the link stalls")


def receive(connections: Sequence[socket.socket], round_trip_seconds: float, peer: str) -> float:
    """Measure the bytes per second that arrive on all connections together, then close them.

    TCP finds its rate in the first second and twenty round trips, which do not count. The result is
    the median over slices of time, so that a gap after a lost packet and the next burst do not
    count either.

    Raises:
        RunError: `peer` sends nothing.
    """
    counts = [0] * len(connections)
    enough = threading.Event()

    def drain(index: int) -> None:
        piece = bytearray(_PIECE)
        with contextlib.suppress(OSError):
            while not enough.is_set() and (count := connections[index].recv_into(piece)):
                counts[index] += count

    with _threads([threading.Thread(target=drain, args=(index,)) for index in range(len(counts))]):
        time.sleep(1.0 + 20 * round_trip_seconds)
        slices = []
        before, start = sum(counts), time.perf_counter()
        for _ in range(_SLICES):
            time.sleep(0.1 + round_trip_seconds)
            after, end = sum(counts), time.perf_counter()
            slices.append((after - before) / (end - start))
            before, start = after, end
        enough.set()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
    for connection in connections:
        # A reset instead of an end, so that nothing waits for the bytes still under way.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    if not any(slices):
        raise RunError(f"nothing arrives from {peer}, which should fill the link")
    return statistics.median(slices)


def packet_share(connection: socket.socket) -> float:
    """Return the share of payload in a full packet of this connection; 1 if it is unknown."""
    try:
        segment = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        options = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[_TCP_INFO_OPTIONS]
    except (OSError, AttributeError):
        return 1.0
    headers = 60 if connection.family == socket.AF_INET6 else 40  # IP's and TCP's
    if options & _TCP_TIMESTAMPS:
        headers += 12
    return segment / (segment + headers)


@contextlib.contextmanager
def _threads(threads: Sequence[threading.Thread]) -> Iterator[None]:
    for thread in threads:
        thread.daemon = True  # also after Ctrl-C none holds up the end of the process
        thread.start()
    yield
    for thread in threads:
        thread.join()


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(TIMEOUT_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes.

    Raises:
        OSError: the connection ended before, or timed out.
    """
    found = b""
    while len(found) < count:
        piece = connection.recv(count - len(found))
        if not piece:
            raise ConnectionError("the connection was closed")
        found += piece
    return found
