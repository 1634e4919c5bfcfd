"""Attempts to connect, and figures of connections as the kernel counts them."""

import contextlib
import socket
import struct
from typing import ClassVar

import pytest
from support.processes import PATIENCE_SECONDS

from geojax.transport import tcp
from geojax.transport.tcp import SocketMeter, dial


class CountedConnection:
    """A connection with figures of the test's choice."""

    def __init__(self, microseconds, resent):
        self.facts = struct.pack("=68xI28xI64x", microseconds, resent)

    def getsockopt(self, level, option, size):
        return self.facts


def test_retransmits_are_those_since_the_last_call():
    meter, first = SocketMeter(), CountedConnection(21_000, 3)
    assert meter.read([first, CountedConnection(25_000, 4)]) == (0.021, 7)
    first.facts = CountedConnection(22_000, 5).facts
    assert meter.read([first]) == (0.022, 2)
    assert meter.read([first]) == (0.022, 0)
    assert meter.read([]) is None
    assert meter.read([CountedConnection(30_000, 1)]) == (0.03, 1)


def test_the_kernel_counts_a_connection_of_tcp():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
    ):
        figures = SocketMeter().read([connection])
    assert figures.retransmits == 0
    assert 0 < figures.round_trip_seconds < 10
    assert SocketMeter().read([connection]) is None


class Attempt(socket.socket):
    """A socket that is kept when it is told to connect."""

    made: ClassVar[list["Attempt"]] = []

    def connect_ex(self, address):
        if self not in self.made:
            self.made.append(self)
        return super().connect_ex(address)


def test_a_packet_that_is_lost_is_followed_by_another_attempt(monkeypatch):
    monkeypatch.setattr(tcp.socket, "socket", Attempt)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
        address = server.getsockname()
        for _ in range(2):  # no room for more: the kernel drops the first packet of a third
            stack.enter_context(socket.create_connection(address))
        monkeypatch.setattr(Attempt, "made", [])
        with pytest.raises(TimeoutError):
            dial(address, 0.2, 0.04)
        assert len(Attempt.made) > 1
        assert all(attempt.fileno() < 0 for attempt in Attempt.made), "an attempt is left open"

        class ServerWakes(list):
            """Attempts, on the third of which the server has room again."""

            def append(self, attempt):
                super().append(attempt)
                if len(self) == 3:
                    for _ in range(2):
                        stack.enter_context(server.accept()[0])

        monkeypatch.setattr(Attempt, "made", ServerWakes())
        with dial(address, PATIENCE_SECONDS, 0.04) as connection:
            assert connection.getpeername() == address
            assert connection.gettimeout() == PATIENCE_SECONDS
        assert len(Attempt.made) >= 3
        assert all(attempt.fileno() < 0 for attempt in Attempt.made)


def test_nobody_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(ConnectionRefusedError):
        dial(address, PATIENCE_SECONDS, 1.0)


def test_one_of_a_name_s_addresses_answers(monkeypatch):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.2", 0)) as other,
    ):
        places = [other.getsockname(), server.getsockname()]
        other.close()
        facts = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]
        monkeypatch.setattr(tcp.socket, "getaddrinfo", lambda *args, **options: facts)
        with dial(("two", 1), PATIENCE_SECONDS, 5.0) as connection:
            assert connection.getpeername() == places[1]
