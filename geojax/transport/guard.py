"""The guard of a process's ports: it lets only peers that know the run's key through.

The transfer engine has no authentication, and four zero bytes at the first of its ports abort the
process (JAX 0.10.2; other bytes, and any at its data ports, did nothing in trials). So it listens
at a loopback address of its own, and a guard, a small process, listens at the address that the
other sites reach:

    engine of site 0 → guard of site 0 ═ handshake, then the same bytes ═ guard of site 1 → engine

On each host the guard listens at the loopback addresses and ports of the remote engines, so that
the addresses that engines tell each other are right on both hosts. It runs as a script that imports
the standard library alone, and ends with its parent. It reads one JSON object a line from its
standard input. The first object has the key, which never appears among arguments.
"""

import contextlib
import errno
import fcntl
import functools
import hmac
import json
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_HELLO = struct.Struct("!8sH16s")
_MAGIC = b"geojax/1"
MAC_BYTES = 32
HANDSHAKE_SECONDS = 10.0
# Connections whose other end has not shown the key yet.
_MOST_STRANGERS = 64
# An attempt to connect; its first packets may be lost, and are sent again later and later.
_ATTEMPT_SECONDS = 3.0
# Between two attempts, where one fails at once.
_PAUSE_SECONDS = 0.3
# A port that is asked for may be that of an earlier run, which is about to end.
_PORT_SECONDS = 5.0
# Between two probes of a connection over which nothing goes.
_PROBE_SECONDS = 15
# Longest time between two transmissions of a packet, and the option's number, of Linux 6.15 and
# later. Without it the time doubles: a link that returns after 26 s is not used until 51 s.
_TCP_RTO_MAX_MS, _RTO_MAX_MS = 44, 1000
# Without that option a packet is sent again within twice the time for which its link was cut.
_LONGEST_BACKOFF = 2
# Between two reports of the peers from which bytes have come.
_REPORT_SECONDS = 1.0
# The most that Linux lets a pipe hold; with its own 64 KiB a byte costs half as much time again.
_PIECE_BYTES = 1 << 20


class Refused(Exception):
    """The other end does not know the key, or speaks another protocol."""


def dial(address: tuple[str, int], key: bytes, port: int, seconds: float) -> socket.socket:
    """Connect to a port behind the guard at `address`.

    Raises:
        ConnectionRefusedError: nobody listens there.
        OSError: no connection in time.
        Refused: the guard does not know the key.
    """
    deadline = time.monotonic() + seconds
    connection = _reach(address, deadline)
    try:
        own = secrets.token_bytes(16)
        connection.sendall(_HELLO.pack(_MAGIC, port, own))
        answer = receive(connection, 16 + MAC_BYTES, deadline)
        facts = struct.pack("!H", port) + own + answer[:16]
        if not hmac.compare_digest(answer[16:], mac(key, b"accept", facts)):
            raise Refused("its key is another")
        connection.sendall(mac(key, b"dial", facts))
        return _established(connection)
    except BaseException:
        connection.close()
        raise


def _reach(address: tuple[str, int], deadline: float) -> socket.socket:
    """Connect in attempts that are short, so that one succeeds soon after a cut has ended."""
    while True:
        remaining = max(0.001, deadline - time.monotonic())
        try:
            connection = socket.create_connection(address, min(remaining, _ATTEMPT_SECONDS))
            _send_again_often(connection)
            return connection
        except ConnectionRefusedError:
            raise
        except OSError:
            if time.monotonic() + _PAUSE_SECONDS > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def admit(connection: socket.socket, key: bytes) -> int:
    """Shake hands with whoever has connected; return the port that it wants.

    Raises:
        OSError: no answer in time.
        Refused: it does not know the key.
    """
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    magic, port, theirs = _HELLO.unpack(receive(connection, _HELLO.size, deadline))
    if magic != _MAGIC:
        raise Refused("it speaks another protocol")
    own = secrets.token_bytes(16)
    facts = struct.pack("!H", port) + theirs + own
    connection.sendall(own + mac(key, b"accept", facts))
    answer = receive(connection, MAC_BYTES, deadline)
    if not hmac.compare_digest(answer, mac(key, b"dial", facts)):
        raise Refused("its key is another")
    _established(connection)
    return int(port)


def mac(key: bytes, who: bytes, facts: bytes) -> bytes:
    """Sign `facts` as the one who says them."""
    return hmac.digest(key, who + facts, "sha256")


def receive(connection: socket.socket, count: int, deadline: float) -> bytes:
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


def _established(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Probe a connection while it is idle, and let it survive cuts of up to `seconds`.

    Firewalls forget connections that have been idle for some minutes, as those of a run are that
    compiles, and a host that has lost one says so only if it is asked.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    # A packet that nobody acknowledges ends the connection only when a cut of `seconds` is over and
    # the packet has been sent again since. The control connection ends the run before.
    patience = int(1e3 * (_LONGEST_BACKOFF * seconds + _PROBE_SECONDS))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
    _send_again_often(connection)


def _send_again_often(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # an older kernel
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS)


def join(
    first: socket.socket, second: socket.socket, heard: Callable[[], None] | None = None
) -> None:
    """Carry bytes between two connections until one ends, then end both.

    Args:
        first: one connection.
        second: the other.
        heard: is called when bytes have come from `second`.
    """
    back = threading.Thread(target=_carry, args=(second, first, heard), daemon=True)
    back.start()
    _carry(first, second)
    back.join()
    first.close()
    second.close()


def _carry(
    source: socket.socket, target: socket.socket, heard: Callable[[], None] | None = None
) -> None:
    pipe = os.pipe()  # bytes go from socket to socket within the kernel
    with contextlib.suppress(OSError):  # the user has many large pipes
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _PIECE_BYTES)
    with contextlib.suppress(OSError):
        while count := os.splice(source.fileno(), pipe[1], _PIECE_BYTES):
            if heard is not None:
                heard()
            while count:
                count -= os.splice(pipe[0], target.fileno(), count)
    for end in pipe:
        os.close(end)
    for connection in (source, target):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


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


class Guard:
    """The guard of one process.

    Args:
        key: key of the run.
        address: address that peers reach; port 0 for any.
        engine: loopback address of this process.
        ports: its ports that peers may reach.
        seconds: time to wait for the guard of a peer, at the start and when it is silent.

    Raises:
        OSError: it cannot listen at the address.
    """

    def __init__(
        self, key: bytes, address: tuple[str, int], engine: str, ports: list[int], seconds: float
    ):
        self._key, self._engine, self._ports, self._seconds = key, engine, ports, seconds
        self._heard: set[str] = set()
        self._handshakes = Handshakes()
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        serve(self._listener, self._admit)

    def forward(self, guard: tuple[str, int], engine: str, ports: list[int]) -> None:
        """Lead connections from this host to a peer's `engine` address through its guard."""
        for port in ports:
            serve(
                socket.create_server((engine, port)),
                functools.partial(self._dial, guard=guard, engine=engine, port=port),
            )

    def take_heard(self) -> list[str]:
        """Return the engines of the peers from which bytes have come since the last call."""
        heard, self._heard = self._heard, set()
        return list(heard)

    def _admit(self, connection: socket.socket) -> None:
        try:
            with self._handshakes.room_for(connection):
                port = admit(connection, self._key)
            keep_alive(connection, self._seconds)
            if port not in self._ports:
                raise Refused("no such port")
            inside = socket.create_connection((self._engine, port))
        except (OSError, Refused):
            return connection.close()
        join(connection, _established(inside))

    def _dial(
        self, connection: socket.socket, guard: tuple[str, int], engine: str, port: int
    ) -> None:
        deadline = time.monotonic() + self._seconds
        while True:
            try:
                outside = dial(guard, self._key, port, min(self._seconds, HANDSHAKE_SECONDS))
                keep_alive(outside, self._seconds)
                break
            except (ConnectionRefusedError, Refused):
                return connection.close()
            except OSError:  # the link may have been cut in the middle of the handshake
                if time.monotonic() > deadline:
                    return connection.close()
        join(_established(connection), outside, lambda: self._heard.add(engine))


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    deadline = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def serve(listener: socket.socket, act: Callable[[socket.socket], None]) -> None:
    """Call `act` with each connection that `listener` accepts, in a thread, until it is closed."""

    def accept() -> None:
        while listener.fileno() >= 0:
            try:
                connection, _ = listener.accept()
            except OSError:  # gone before it was accepted, no files left for now, or closed
                time.sleep(0.05)
                continue
            threading.Thread(target=act, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _tell(message: dict[str, Any]) -> None:
    os.write(1, f"{json.dumps(message)}\n".encode())  # whole, whichever thread says it


def _report(guard: Guard) -> None:
    while True:
        time.sleep(_REPORT_SECONDS)
        if heard := guard.take_heard():
            _tell({"heard": heard})


def main() -> None:
    """Guard the parent's ports; say on standard output what has been done."""
    # It asks the parent for a profile, and a scheduler sends it to all processes of a job.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    first = json.loads(sys.stdin.readline())
    try:
        guard = Guard(
            bytes.fromhex(first["key"]),
            tuple(first["address"]),
            first["engine"],
            first["ports"],
            first["seconds"],
        )
        _tell({"port": guard.port})
        threading.Thread(target=_report, args=(guard,), daemon=True).start()
        for line in sys.stdin:
            peer = json.loads(line)
            guard.forward(tuple(peer["guard"]), peer["engine"], peer["ports"])
            _tell({})
    except OSError as error:
        # The exception itself repeats the address, as Python tells it.
        reason = os.strerror(error.errno) if error.errno else str(error)
        _tell({"error": reason})
    os._exit(0)  # threads still carry


if __name__ == "__main__":
    main()
