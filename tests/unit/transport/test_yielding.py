"""How much that yields is handed to the kernel, beside what the kernel holds already."""

import contextlib
import socket

import pytest

from geojax.transport import yielding
from geojax.transport.tcp import TcpCounts, tcp_counts
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
        assert tcp_counts(near).unsent_bytes == 0
        near.setblocking(False)
        sent = near.send(bytes(1 << 24))  # more than the other end takes in
        counts = tcp_counts(near)
        assert 0 < counts.unsent_bytes <= sent
        taken = 0
        while taken < sent:
            taken += len(far.recv(1 << 20))
        near.sendall(b"end")
        assert far.recv(3) == b"end"
        counts = tcp_counts(near)
        assert counts.unsent_bytes == 0
        assert counts.bytes_per_second > 0
        assert 0 < counts.least_microseconds < 1e6
    assert tcp_counts(near) is None


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
    ("counts", "spare"),
    [
        # 13 Mbit/s behind a router whose queue holds seconds: a little more than two pieces.
        (TcpCounts(1448, 0, 5, 0, 0, 5, 1_600_000), LEAST_PIECE),
        (TcpCounts(1448, 28, 5, 0, 0, 5, 1_600_000), LEAST_PIECE),
        (TcpCounts(1448, 29, 5, 0, 0, 5, 1_600_000), 0),
        # 1 Gbit/s and 21 ms: 2.6 MB fill the path, and a quarter more may be on it.
        (TcpCounts(1448, 1900, 25_000, 0, 0, 21_000, 125_000_000), 500_000),
        (TcpCounts(1448, 2400, 25_000, 0, 0, 21_000, 125_000_000), 0),
        (TcpCounts(1448, 0, 21_000, 0, 1, 21_000, 125_000_000), 0),
        (TcpCounts(1250, 2545, 25_000, 0, 0, 21_000, 125_000_000), 100_000),
        # A burst passed at 3 Gbit/s within 3 microseconds.
        (TcpCounts(1448, 0, 60_000, 0, 0, 3, 413_000_000), 5 * LEAST_PIECE // 4),
        (None, LEAST_PIECE),
    ],
)
def test_what_yields_fills_the_path_and_no_queue(monkeypatch, counts, spare):
    monkeypatch.setattr(yielding, "tcp_counts", lambda connection: counts)
    urgent = UrgentTraffic()
    with socket.socket() as connection:
        urgent.watch(connection)
        assert urgent.spare_bytes(connection) == spare


def test_looks_are_less_often_the_longer_nothing_may_go(monkeypatch):
    now = 0.0
    monkeypatch.setattr(yielding.time, "monotonic", lambda: now)
    urgent = UrgentTraffic()
    with socket.socket() as connection:
        for waited, seconds in ((0.001, 0.002), (0.015, 0.005), (5.0, 0.02)):
            assert urgent.spare_bytes(connection) > 0
            now += waited
            assert urgent.patience() == pytest.approx(seconds)
