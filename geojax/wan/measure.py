"""Round trip and throughput between two sites, by TCP through their real namespaces."""

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator

from geojax.errors import RunError
from geojax.wan.namespaces import inside
from geojax.wan.settings import WanSettings
from geojax.wan.state import EmulatedSite, EmulatedWan, Measurement

_EXCHANGES = 15
_STREAMS = 4
_PIECE = 2**20


def measured(wan: EmulatedWan) -> EmulatedWan:
    """`wan` with what was measured over each of its links, also in the state file.

    Raises:
        RunError: a link does not carry a connection.
    """
    links = []
    for link in wan.links:
        first, second = (wan.site(name) for name in link.sites)
        there = bytes_per_second(first, second, wan.settings)
        back = bytes_per_second(second, first, wan.settings)
        found = Measurement(
            round_trip_seconds=round_trip_seconds(first, second), bytes_per_second=(there, back)
        )
        links.append(link.model_copy(update={"measured": found}))
    wan = wan.model_copy(update={"links": tuple(links)})
    wan.save()
    return wan


def round_trip_seconds(first: EmulatedSite, second: EmulatedSite) -> float:
    """The median time of one byte from `first` to `second` and back.

    Raises:
        RunError: there is no connection.
    """
    with _connections(first, second, 1) as [(here, there)]:
        for connection in (here, there):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=_echo, args=(there,))
        echo.start()
        times = []
        for _ in range(_EXCHANGES):
            start = time.perf_counter()
            here.sendall(b"?")
            here.recv(1)
            times.append(time.perf_counter() - start)
        here.shutdown(socket.SHUT_WR)
        echo.join()
    return statistics.median(times)


def bytes_per_second(source: EmulatedSite, target: EmulatedSite, settings: WanSettings) -> float:
    """TCP payload per second from `source` to `target`, when several streams fill the link.

    Timed at the receiver, after the streams had 20 round trips to find their rate.

    Raises:
        RunError: there is no connection.
    """
    warm_up = 0.5 + 20 * settings.round_trip_seconds
    duration = 1.0 + 10 * settings.round_trip_seconds
    received = [0] * _STREAMS
    with _connections(source, target, _STREAMS) as pairs:
        threads = [threading.Thread(target=_send, args=(sender,)) for sender, _ in pairs]
        threads += [
            threading.Thread(target=_count, args=(receiver, received, stream))
            for stream, (_, receiver) in enumerate(pairs)
        ]
        for thread in threads:
            thread.start()
        time.sleep(warm_up)
        before, start = sum(received), time.perf_counter()
        time.sleep(duration)
        after, end = sum(received), time.perf_counter()
        for pair in pairs:
            for connection in pair:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
    return (after - before) / (end - start)


@contextlib.contextmanager
def _connections(
    first: EmulatedSite, second: EmulatedSite, count: int
) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """`count` TCP connections from `first` to `second`, both ends in this process."""
    with contextlib.ExitStack() as stack:
        pairs = []
        try:
            with inside(second.namespace):
                listener = stack.enter_context(socket.create_server((second.address, 0)))
            listener.settimeout(30)
            for _ in range(count):
                with inside(first.namespace):
                    here = socket.create_connection(listener.getsockname(), timeout=30)
                stack.enter_context(here)
                there = stack.enter_context(listener.accept()[0])
                pairs.append((here, there))
        except OSError as error:
            raise RunError(
                f"{first.name} cannot reach {second.name} over the emulated link: {error}"
            ) from None
        for connection in (end for pair in pairs for end in pair):
            connection.settimeout(30)
        yield pairs


def _echo(connection: socket.socket) -> None:
    while byte := connection.recv(1):
        connection.sendall(byte)


def _send(connection: socket.socket) -> None:
    piece = bytes(_PIECE)
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(piece)


def _count(connection: socket.socket, received: list[int], stream: int) -> None:
    piece = bytearray(_PIECE)
    with contextlib.suppress(OSError):
        while count := connection.recv_into(piece):
            received[stream] += count
