"""How much that yields is handed to the kernel, beside what the kernel holds already."""

import contextlib
import socket

import pytest

from geojax.transport import yielding
from geojax.transport.tcp import SendQueue, send_queue
from geojax.transport.yielding import LEAST_PIECE, UrgentTraffic


@contextlib.contextmanager
def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            yield near, far


def test_bytes_that_wait_in_the_kernel_are_counted():
    with connected() as (near, far):
        assert send_queue(near).unsent == 0
        near.setblocking(False)
        sent = near.send(bytes(1 << 24))  # more than the other end takes in
        queue = send_queue(near)
        assert 0 < queue.unsent <= sent
        taken = 0
        while taken < sent:
            taken += len(far.recv(1 << 20))
        near.sendall(b"end")
        assert far.recv(3) == b"end"
        queue = send_queue(near)
        assert queue.unsent == 0
        assert queue.bytes_per_second > 0
        assert 0 < queue.round_trip < 1
    assert send_queue(near) == SendQueue()


def test_nothing_that_yields_goes_while_another_link_has_unsent_bytes():
    urgent = UrgentTraffic()
    with connected() as (near, far), connected() as (other, _):
        urgent.watch(near)
        urgent.watch(other)
        assert urgent.spare_bytes(other) >= LEAST_PIECE
        near.setblocking(False)
        sent = near.send(bytes(1 << 24))
        assert urgent.spare_bytes(other) == 0
        taken = 0
        while taken < sent:
            taken += len(far.recv(1 << 20))
        assert urgent.spare_bytes(other) >= LEAST_PIECE
        urgent.add(5)
        assert urgent.spare_bytes(other) == 0
        urgent.add(-5)
        assert urgent.spare_bytes(other) >= LEAST_PIECE


@pytest.mark.parametrize(
    ("queue", "spare"),
    [
        # 13 Mbit/s behind a router whose queue holds seconds: one small piece at a time.
        (SendQueue(0, 0, 1.6e6, 5e-6), LEAST_PIECE),
        (SendQueue(0, 1448, 1.6e6, 5e-6), 0),
        # 1 Gbit/s and 21 ms: 2.6 MB fill the path, and as much again by a quarter may be on it.
        (SendQueue(0, 3_000_000, 125e6, 0.021), 500_000),
        (SendQueue(0, 3_500_000, 125e6, 0.021), 0),
        (SendQueue(1, 0, 125e6, 0.021), 0),
    ],
)
def test_what_yields_fills_the_path_and_no_queue(monkeypatch, queue, spare):
    monkeypatch.setattr(yielding, "send_queue", lambda connection: queue)
    urgent = UrgentTraffic()
    with socket.socket() as connection:
        urgent.watch(connection)
        assert urgent.spare_bytes(connection) == spare
