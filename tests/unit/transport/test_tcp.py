"""Figures of connections, as the kernel counts them."""

import socket
import struct

from geojax.transport.tcp import SocketMeter


class CountedConnection:
    """A connection with figures of the test's choice."""

    def __init__(self, microseconds, resent):
        self.facts = struct.pack("=68xI28xI", microseconds, resent)

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
