"""The relay between two pairs of sockets, which are to it what TUN devices are.

Lower bounds of times are the link's; upper bounds are the machine's patience.
"""

import contextlib
import os
import socket
import struct
import time

import pytest
from support.emulated_link import skip_without_compiler
from support.processes import PATIENCE_SECONDS, wait_until

from geojax.wan import WanSettings
from geojax.wan.relay import RelayStart, compiled, is_running, processor_seconds, stop

CORES = (min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0)))

MARKS = 1_000_000
"""Numbers of packets from here on say that all before them are through or lost."""

WHOLE = struct.pack("=BBHHHH", 0, 0, 0, 0, 0, 0)
"""The virtio_net_hdr of a packet as it will be on the wire."""


@pytest.fixture
def relayed(tmp_path):
    """A function that starts a relay and gives both far ends and what lets packets through."""
    skip_without_compiler()
    compiled()
    with contextlib.ExitStack() as stack:

        def start(**settings):
            ends, devices = [], []
            for _ in range(2):
                end, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                device.setblocking(False)
                end.settimeout(60)
                ends.append(stack.enter_context(end))
                devices.append(device.detach())
            begun = RelayStart(tuple(devices), WanSettings(**settings), CORES, tmp_path / "log")
            stack.callback(stop, begun.relay)
            return *ends, begun

        yield start


def packet(number, size=100):
    """An IP packet of `size` bytes without meaning, but for a number."""
    return WHOLE + number.to_bytes(4, "big").ljust(size, b"\0")


def number_of(received):
    return int.from_bytes(received[len(WHOLE) :][:4], "big")


def test_packets_take_half_the_round_trip_and_keep_their_order(relayed):
    # A jitter as large as the delay would send nearly every packet past the one before it.
    east, west, start = relayed(round_trip_seconds=0.1, jitter_seconds=0.05)
    start.begin()
    for source, target in ((east, west), (west, east)):
        began = time.monotonic()
        for number in range(100):
            source.send(packet(number))
        assert [number_of(target.recv(2000)) for _ in range(100)] == list(range(100))
        assert time.monotonic() - began < PATIENCE_SECONDS
    steady_east, steady_west, start = relayed(round_trip_seconds=0.1)
    start.begin()
    began = time.monotonic()
    steady_east.send(packet(1, 1500))
    assert steady_west.recv(2000) == packet(1, 1500)
    # Half a pause (a 32nd of the delay) early at most.
    assert 0.05 * (1 - 1 / 64) <= time.monotonic() - began < PATIENCE_SECONDS


def test_each_direction_has_a_thread_on_its_core(relayed):
    east, west, start = relayed()
    start.begin()
    for source, target in ((east, west), (west, east)):
        source.send(packet(1))
        assert target.recv(2000) == packet(1)
    threads = map(int, os.listdir(f"/proc/{start.relay.process_id}/task"))
    pinned = [core for each in threads for core in os.sched_getaffinity(each)]
    assert sorted(pinned) == sorted(CORES)
    assert start.relay.cores == CORES


def test_its_processor_time_is_known_while_it_runs(relayed):
    east, west, start = relayed()
    start.begin()
    began = time.monotonic()
    while processor_seconds(start.relay) == 0:
        assert time.monotonic() - began < PATIENCE_SECONDS
        east.send(packet(1, 1500))
        assert west.recv(2000) == packet(1, 1500)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert processor_seconds(start.relay) <= len(CORES) * (time.monotonic() - began + tick)
    stop(start.relay)
    with pytest.raises(ProcessLookupError):
        processor_seconds(start.relay)


def test_a_segment_of_many_packets_takes_the_time_of_all_with_their_headers(relayed):
    east, west, start = relayed(bytes_per_second=150_000)
    headers = bytearray(52)
    headers[32] = 8 << 4  # TCP's header: eight words
    offloaded = struct.pack("=BBHHHH", 1, 1, 52, 1448, 20, 16)
    segment = offloaded + bytes(headers) + bytes(10 * 1448)
    start.begin()
    began = time.monotonic()
    east.send(segment)
    assert west.recv(65536) == segment
    assert time.monotonic() - began >= 10 * 1500 / 150_000


def test_what_the_queue_does_not_hold_is_dropped_at_its_tail(relayed):
    east, west, start = relayed(bytes_per_second=1_000_000, queue_bytes=2**17)
    east.setblocking(True)  # with a timeout a socket takes a quarter of what it holds
    for number in range(9):  # all there at once, as the relay has not begun
        east.send(packet(number, 20_000))
    start.begin()
    fitting = 2**17 // 20_000
    assert [number_of(west.recv(40_000)) for _ in range(fitting)] == list(range(fitting))
    assert drained(west) == 0
    east.send(packet(9, 20_000))
    assert number_of(west.recv(40_000)) == 9


def test_packets_get_lost_in_the_share_that_was_asked(relayed):
    east, west, start = relayed(loss=0.25)
    start.begin()
    sent, west_count = 4000, 0
    for number in range(sent):
        east.send(packet(number))
        if number % 100 == 99:  # no more than a socket holds
            west_count += counted_until_a_mark(east, west, mark=MARKS + number)
    # Five standard deviations of the binomial distribution.
    assert abs(west_count - 0.75 * sent) < 5 * (sent * 0.25 * 0.75) ** 0.5


def counted_until_a_mark(source, target, mark):
    """Packets that arrive before one with the number `mark`, which is sent until it does."""
    count = 0
    target.settimeout(0.05)
    while True:
        source.send(packet(mark))
        with contextlib.suppress(TimeoutError):
            while (found := number_of(target.recv(2000))) != mark:
                count += found < MARKS
            return count


def drained(end):
    count = 0
    end.settimeout(0.05)
    with contextlib.suppress(TimeoutError):
        while end.recv(20_000):
            count += 1
    end.settimeout(60)
    return count


def test_it_ends_with_its_devices_and_when_nobody_lets_it_begin(relayed, tmp_path):
    east, _, start = relayed()
    start.begin()
    east.close()
    ended(start.relay)
    assert "a device is gone" in (tmp_path / "log").read_text()
    *_, start = relayed()
    start._process.stdin.close()  # as when the one who started it dies
    ended(start.relay)


def ended(relay):
    wait_until(lambda: not is_running(relay), "the relay lives on")
