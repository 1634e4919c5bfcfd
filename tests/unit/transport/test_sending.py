"""Pieces of messages: their order, and a channel that goes on from any byte."""

import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import PATIENCE_SECONDS

from geojax.transport.handshake import ChannelHello, Party, PeerRoute, Refused
from geojax.transport.host_memory import HostBytes
from geojax.transport.sending import PIECE_HEADER, Outbox, OutgoingChannel
from geojax.transport.yielding import LEAST_PIECE, UrgentTraffic

ROUTE = PeerRoute(b"k", Party(0, "a"), Party(1, "b"), ("127.0.0.1", 1), 1.0)


def content(size, value=0):
    return HostBytes([memoryview(np.full(size, value, np.uint8))])


@given(st.lists(st.integers(0, 9), max_size=6), st.data())
def test_a_part_of_shards_is_that_of_their_bytes(sizes, data):
    shards = [
        bytes([10 * place + number for number in range(size)]) for place, size in enumerate(sizes)
    ]
    whole = b"".join(shards)
    held = HostBytes([memoryview(shard) for shard in shards])
    offset = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - offset))
    assert held.size == len(whole)
    assert b"".join(held.part(offset, count)) == whole[offset : offset + count]


def next_piece(outbox):
    """The next piece for a connection of which the kernel counts nothing."""
    with socket.socket(socket.AF_UNIX) as connection:
        return outbox.next_piece(connection)


def pieces(outbox):
    return list(iter(lambda: next_piece(outbox), None))


def test_nothing_is_sent_that_was_not_asked_for_or_is_not_computed():
    outbox = Outbox(4, UrgentTraffic())
    outbox.computed(2, content(6))
    outbox.ask(4)
    assert pieces(outbox) == []
    outbox.ask(2)
    assert pieces(outbox) == [(2, 0, 4), (2, 4, 2)]
    outbox.computed(4, content(0))
    assert pieces(outbox) == [(4, 0, 0)]


def test_what_lacks_least_goes_first_and_equal_ones_one_after_the_other():
    outbox = Outbox(4, UrgentTraffic())
    for message, size in ((2, 12), (4, 12), (6, 3)):
        outbox.ask(message)
        outbox.computed(message, content(size))
    assert next_piece(outbox) == (6, 0, 3)
    assert next_piece(outbox) == (2, 0, 4)
    outbox.ask(8)
    outbox.computed(8, content(5))
    assert [message for message, *_ in pieces(outbox)] == [8, 8, 2, 2, 4, 4, 4]


def test_what_yields_waits_for_the_messages_of_all_links():
    urgent = UrgentTraffic()
    here, there = Outbox(4, urgent), Outbox(4, urgent)
    here.ask(2)
    here.computed(2, content(6), yields=True)
    assert next_piece(here) == (2, 0, 4)
    there.ask(4)
    there.computed(4, content(5))
    assert next_piece(here) is None
    with socket.socket() as connection:
        assert 0 < here.patience(connection) < 1
    assert here.patience(None) is None
    assert pieces(there) == [(4, 0, 4), (4, 4, 1)]
    assert next_piece(here) == (2, 4, 2)
    there.ask(6)
    there.computed(6, content(5))
    here.ask(8)
    here.computed(8, content(1), yields=True)
    assert next_piece(here) is None
    there.close()
    assert next_piece(here) == (8, 0, 1)
    with socket.socket() as connection:
        assert here.patience(connection) is None


def test_small_messages_that_yield_go_together():
    urgent = UrgentTraffic()
    outbox = Outbox(1 << 20, urgent)
    sizes = {2: LEAST_PIECE // 2, 4: LEAST_PIECE // 4, 6: LEAST_PIECE // 2}
    for message, size in sizes.items():
        outbox.ask(message)
        outbox.computed(message, content(size), yields=True)
    looks = []
    urgent.spare_bytes = lambda connection: looks.append(connection) or LEAST_PIECE
    assert next_piece(outbox) == (4, 0, sizes[4])
    assert next_piece(outbox) == (2, 0, sizes[2])
    assert next_piece(outbox) == (6, 0, LEAST_PIECE // 4)
    assert len(looks) == 1
    assert next_piece(outbox) == (6, LEAST_PIECE // 4, LEAST_PIECE // 4)
    assert len(looks) == 2


def test_a_closed_outbox_keeps_nothing():
    outbox = Outbox(4, UrgentTraffic())
    outbox.ask(2)
    outbox.close()
    outbox.computed(2, content(6))
    assert outbox.content(2) is None
    assert pieces(outbox) == []


def received(connection, count):
    connection.settimeout(PATIENCE_SECONDS)
    came = b""
    while len(came) < count:
        came += connection.recv(count - len(came))
    return came


def test_a_channel_goes_on_from_the_byte_that_has_come():
    outbox = Outbox(100, UrgentTraffic())
    for message, size in ((2, 250), (4, 120)):
        outbox.ask(message)
        outbox.computed(message, content(size, message))
    channel = OutgoingChannel(outbox, ROUTE)
    total = 370 + 5 * PIECE_HEADER.size

    def connect(number, count):
        server = socket.create_server(("127.0.0.1", 0))
        with server:
            far = socket.create_connection(server.getsockname())
            near, _ = server.accept()
        try:
            channel.adopt(near, ChannelHello(1, 0, 1, number, count, b""))
        except Refused:
            near.close()
            far.close()
            raise
        received(far, 40)  # the handshake's answer
        return far

    with connect(1, 0) as first:
        whole = received(first, total)
    for number, count in enumerate((0, 3, 24, 100, 124, 200, total - 1), 2):
        with connect(number, count) as again:
            assert received(again, total - count) == whole[count:]
        with pytest.raises(Refused, match="bytes that were not sent"):
            connect(100, total + 1)
    with pytest.raises(Refused, match="a later connection"):
        connect(2, 0)
    outbox.forget(2)
    outbox.forget(4)
    channel.close()
