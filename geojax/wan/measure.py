"""Round trip and throughput between two sites, measured by TCP through their namespaces."""

import contextlib
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Iterator

from geojax.errors import RunError
from geojax.wan.namespaces import inside, traffic
from geojax.wan.settings import WanSettings
from geojax.wan.state import EmulatedSite, EmulatedWan, Measurement

_EXCHANGES = 15
_STREAMS = 4
_PIECE = 2**20
_TIMEOUT_SECONDS = 10.0


def measured(wan: EmulatedWan) -> EmulatedWan:
    """Measure the links of `wan` one after the other, and return it with the measurements.

    Raises:
        RunError: a link does not carry a connection.
    """
    links = []
    for link in wan.links:
        first, second = (wan.site(name) for name in link.sites)
        round_trip = round_trip_seconds(first, second)  # before throughput fills the queues
        there = bytes_per_second(first, second, wan.settings)
        back = bytes_per_second(second, first, wan.settings)
        found = Measurement(round_trip_seconds=round_trip, bytes_per_second=(there, back))
        links.append(link.model_copy(update={"measured": found}))
    return wan.model_copy(update={"links": tuple(links)})


def round_trip_seconds(first: EmulatedSite, second: EmulatedSite) -> float:
    """Measure the median time of one byte from `first` to `second` and back.

    Raises:
        RunError: there is no connection.
    """
    with _connection(first, second) as (here, there):
        for connection in (here, there):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo = threading.Thread(target=_echo, args=(there,))
        echo.start()
        times = []
        try:
            for _ in range(_EXCHANGES):
                start = time.perf_counter()
                here.sendall(b"?")
                here.recv(1)
                times.append(time.perf_counter() - start)
        except OSError as error:
            raise RunError(
                f"{second.name} does not answer {first.name} over the emulated link: {error}"
            ) from None
        finally:
            here.close()
            echo.join()
    return statistics.median(times)


def bytes_per_second(source: EmulatedSite, target: EmulatedSite, settings: WanSettings) -> float:
    """Measure the bytes per second from `source` to `target` when TCP streams fill the link.

    The receiving interface counts them (`SiteTraffic` explains the headers), after the streams had
    20 round trips to find their rate.

    Raises:
        RunError: there is no connection.
    """
    warm_up = 0.5 + 20 * settings.round_trip_seconds
    duration = 1.0 + 10 * settings.round_trip_seconds
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(_connection(source, target)) for _ in range(_STREAMS)]
        threads = [threading.Thread(target=_send, args=(sender,)) for sender, _ in pairs]
        threads += [threading.Thread(target=_drain, args=(receiver,)) for _, receiver in pairs]
        for thread in threads:
            thread.start()
        try:
            time.sleep(warm_up)
            before, start = traffic(target.namespace).received_bytes, time.perf_counter()
            time.sleep(duration)
            after, end = traffic(target.namespace).received_bytes, time.perf_counter()
        finally:  # also after Ctrl-C no thread stays
            for connection in itertools.chain.from_iterable(pairs):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    return (after - before) / (end - start)


@contextlib.contextmanager
def _connection(
    first: EmulatedSite, second: EmulatedSite
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Open a TCP connection from `first` to `second`, with both ends in this process."""
    with contextlib.ExitStack() as stack:
        try:
            with inside(second.namespace):
                listener = stack.enter_context(socket.create_server((second.address, 0)))
            with inside(first.namespace):
                address = listener.getsockname()
                here = stack.enter_context(socket.create_connection(address, _TIMEOUT_SECONDS))
            listener.settimeout(_TIMEOUT_SECONDS)
            there = stack.enter_context(listener.accept()[0])
        except OSError as error:
            raise RunError(
                f"{first.name} cannot reach {second.name} over the emulated link: {error}"
            ) from None
        there.settimeout(_TIMEOUT_SECONDS)
        yield here, there


def _send(connection: socket.socket) -> None:
    piece = bytes(_PIECE)
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(piece)


def _drain(connection: socket.socket) -> None:
    piece = bytearray(_PIECE)
    with contextlib.suppress(OSError):
        while connection.recv_into(piece):
            pass


def _echo(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while byte := connection.recv(1):
            connection.sendall(byte)
