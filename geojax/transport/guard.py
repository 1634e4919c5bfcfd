"""The guard of a process's ports: it lets only peers that know the run's key through.

The transfer engine has no authentication, and four wrong bytes on its port abort the process. So it
listens at a loopback address of its own, and a guard, a small process, listens at the address that
the other sites reach:

    engine of site 0 → guard of site 0 ═ handshake, then the same bytes ═ guard of site 1 → engine

On each host the guard listens at the loopback addresses and ports of the remote engines, so that
the addresses that engines tell each other are right on both hosts. It runs as a script that imports
the standard library alone, reads one JSON object a line from its standard input (the first has the
key, which never appears among arguments), and ends with its parent.
"""

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from typing import Any

_HELLO = struct.Struct("!8sH16s")
_MAGIC = b"geojax/1"
_MAC_BYTES = 32
_HANDSHAKE_SECONDS = 10.0
# Strangers may hold this many connections while they fail the handshake.
_MOST_STRANGERS = 64
# Between two probes of a connection over which nothing goes.
_PROBE_SECONDS = 15
# The most that Linux lets a pipe hold; with its own 64 KiB a byte costs half as much time again.
_PIECE_BYTES = 1 << 20


class Refused(Exception):
    """The other end does not know the key, or speaks another protocol."""


def dial(address: tuple[str, int], key: bytes, port: int, seconds: float) -> socket.socket:
    """Connect to a port behind the guard at `address`.

    Raises:
        OSError: no connection, or none in time.
        Refused: the guard does not know the key.
    """
    connection = socket.create_connection(address, seconds)
    try:
        own = secrets.token_bytes(16)
        deadline = time.monotonic() + seconds
        connection.sendall(_HELLO.pack(_MAGIC, port, own))
        answer = _receive(connection, 16 + _MAC_BYTES, deadline)
        facts = struct.pack("!H", port) + own + answer[:16]
        if not hmac.compare_digest(answer[16:], _mac(key, b"accept", facts)):
            raise Refused("its key is another")
        connection.sendall(_mac(key, b"dial", facts))
        return _established(connection)
    except BaseException:
        connection.close()
        raise


def admit(connection: socket.socket, key: bytes) -> int:
    """Shake hands with whoever has connected; return the port that it wants.

    Raises:
        OSError: no answer in time.
        Refused: it does not know the key.
    """
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    magic, port, theirs = _HELLO.unpack(_receive(connection, _HELLO.size, deadline))
    if magic != _MAGIC:
        raise Refused("it speaks another protocol")
    own = secrets.token_bytes(16)
    facts = struct.pack("!H", port) + theirs + own
    connection.sendall(own + _mac(key, b"accept", facts))
    answer = _receive(connection, _MAC_BYTES, deadline)
    if not hmac.compare_digest(answer, _mac(key, b"dial", facts)):
        raise Refused("its key is another")
    _established(connection)
    return int(port)


def _mac(key: bytes, who: bytes, facts: bytes) -> bytes:
    return hmac.digest(key, who + facts, "sha256")


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
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
    """Probe a connection while it is idle; end it when nothing was answered for `seconds`.

    Firewalls forget connections that have been idle for some minutes, as those of a run are that
    compiles, and a host that has lost one says so only if it is asked.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * seconds))


def join(first: socket.socket, second: socket.socket) -> None:
    """Carry bytes between two connections until one ends, then end both."""
    back = threading.Thread(target=_carry, args=(second, first), daemon=True)
    back.start()
    _carry(first, second)
    back.join()
    first.close()
    second.close()


def _carry(source: socket.socket, target: socket.socket) -> None:
    pipe = os.pipe()  # bytes go from socket to socket within the kernel
    with contextlib.suppress(OSError):  # the user has many large pipes
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, _PIECE_BYTES)
    with contextlib.suppress(OSError):
        while count := os.splice(source.fileno(), pipe[1], _PIECE_BYTES):
            while count:
                count -= os.splice(pipe[0], target.fileno(), count)
    for end in pipe:
        os.close(end)
    for connection in (source, target):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class Guard:
    """The guard of one process.

    Args:
        key: key of the run.
        address: address that peers reach; port 0 for any.
        engine: loopback address of this process.
        ports: its ports that peers may reach.
        seconds: time to wait for the guard of a peer, at the start and when it is silent.
    """

    def __init__(
        self, key: bytes, address: tuple[str, int], engine: str, ports: list[int], seconds: float
    ):
        self._key, self._engine, self._ports, self._seconds = key, engine, ports, seconds
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.port: int = self._listener.getsockname()[1]
        _serve(self._listener, self._admit)

    def forward(self, guard: tuple[str, int], engine: str, ports: list[int]) -> None:
        """Lead connections from this host to a peer's `engine` address through its guard."""
        for port in ports:
            _serve(
                socket.create_server((engine, port)),
                lambda connection, port=port: self._dial(connection, guard, port),
            )

    def _admit(self, connection: socket.socket) -> None:
        if not self._strangers.acquire(blocking=False):
            return connection.close()
        try:
            port = admit(connection, self._key)
            keep_alive(connection, self._seconds)
            if port not in self._ports:
                raise Refused("no such port")
            inside = socket.create_connection((self._engine, port))
        except (OSError, Refused):
            return connection.close()
        finally:
            self._strangers.release()
        join(connection, _established(inside))

    def _dial(self, connection: socket.socket, guard: tuple[str, int], port: int) -> None:
        try:
            outside = dial(guard, self._key, port, self._seconds)
            keep_alive(outside, self._seconds)
        except (OSError, Refused):
            return connection.close()
        join(_established(connection), outside)


def _serve(listener: socket.socket, act: Any) -> None:
    """Call `act` with each connection that `listener` accepts, in a thread."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # gone before it was accepted, or no files left for now
                time.sleep(0.05)
                continue
            threading.Thread(target=act, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def main() -> None:
    """Guard the parent's ports; say on standard output what has been done."""
    first = json.loads(sys.stdin.readline())
    try:
        guard = Guard(
            bytes.fromhex(first["key"]),
            tuple(first["address"]),
            first["engine"],
            first["ports"],
            first["seconds"],
        )
        print(json.dumps({"port": guard.port}), flush=True)
        for line in sys.stdin:
            peer = json.loads(line)
            guard.forward(tuple(peer["guard"]), peer["engine"], peer["ports"])
            print(json.dumps({}), flush=True)
    except OSError as error:
        # The exception itself repeats the address, as Python tells it.
        reason = os.strerror(error.errno) if error.errno else str(error)
        print(json.dumps({"error": reason}), flush=True)
    os._exit(0)  # threads still carry


if __name__ == "__main__":
    main()
