"""The guard: peers get through, strangers do not, and rubbish does no harm."""

import contextlib
import os
import secrets
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from support.ports import free_port
from support.processes import PATIENCE_SECONDS, family
from support.tcp_resets import connections, reset

from geojax.errors import UserError
from geojax.transport.guard import Guard, Refused, dial
from geojax.transport.guard_process import GuardProcess

KEY = bytes(range(32))


@pytest.fixture
def echo():
    """Port of a server at 127.0.0.1 that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection):
            with connection, contextlib.suppress(OSError):
                while piece := connection.recv(1 << 16):
                    connection.sendall(piece)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]


def received(connection, count):
    connection.settimeout(PATIENCE_SECONDS)
    pieces = b""
    while len(pieces) < count and (piece := connection.recv(1 << 16)):
        pieces += piece
    return pieces


def test_bytes_pass_through_two_guards(echo):
    there = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], PATIENCE_SECONDS)
    here = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)
    here.forward(("127.0.0.1", there.port), "127.9.9.9", [echo])
    message = secrets.token_bytes(1 << 20)
    with socket.create_connection(("127.9.9.9", echo)) as connection:
        threading.Thread(target=connection.sendall, args=(message,)).start()
        assert received(connection, len(message)) == message


def test_a_reset_passes_through_two_guards():
    with socket.create_server(("127.0.0.1", 0)) as engine:
        port = engine.getsockname()[1]
        there = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [port], PATIENCE_SECONDS)
        here = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)
        here.forward(("127.0.0.1", there.port), "127.9.9.8", [port])
        with socket.create_connection(("127.9.9.8", port)) as near:
            engine.settimeout(PATIENCE_SECONDS)
            far, _ = engine.accept()
            with far:
                near.sendall(b"alive")
                assert received(far, 5) == b"alive"
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                near.close()
                assert received(far, 1) == b""


def test_a_link_between_guards_that_is_reset_ends_both_connections(echo):
    there = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], PATIENCE_SECONDS)
    here = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)
    here.forward(("127.0.0.1", there.port), "127.9.9.7", [echo])
    with socket.create_connection(("127.9.9.7", echo)) as near:
        near.sendall(b"alive")
        assert received(near, 5) == b"alive"
        assert reset(each for each in connections() if each.remote_port == there.port) == 1
        assert received(near, 1) == b""


def idle_timers(port):
    """The timers of the established connections to and from a port: 02 is that of a probe."""
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, here, there, state, _, timer, *_ = line.split()
        if state == "01" and port in (int(end.partition(":")[2], 16) for end in (here, there)):
            found.append(timer[:2])
    return found


def test_both_guards_probe_an_idle_link(echo):
    there = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], 5)
    here = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [], 5)
    here.forward(("127.0.0.1", there.port), "127.9.9.6", [echo])
    with socket.create_connection(("127.9.9.6", echo)) as near:
        near.sendall(b"alive")
        assert received(near, 5) == b"alive"
        end = time.monotonic() + 60
        while idle_timers(there.port) != ["02", "02"]:  # an acknowledgment may be under way
            assert time.monotonic() < end, idle_timers(there.port)
            time.sleep(0.01)


@pytest.mark.parametrize("rubbish", [b"\0\0\0\0", b"geojax/1" + bytes(18) + bytes(32), None])
def test_rubbish_ends_its_own_connection_alone(echo, rubbish):
    guard = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], PATIENCE_SECONDS)
    with socket.create_connection(("127.0.0.1", guard.port)) as stranger:
        stranger.sendall(rubbish or secrets.token_bytes(4096))
        with contextlib.suppress(OSError):  # it may be closed already
            stranger.shutdown(socket.SHUT_WR)
            assert len(received(stranger, 1 << 20)) <= 48
    with dial(("127.0.0.1", guard.port), KEY, echo, PATIENCE_SECONDS) as peer:
        peer.sendall(b"alive")
        assert received(peer, 5) == b"alive"


def test_strangers_that_say_nothing_make_room_for_a_peer_at_once(echo):
    guard = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], PATIENCE_SECONDS)
    with contextlib.ExitStack() as held:
        strangers = [
            held.enter_context(socket.create_connection(("127.0.0.1", guard.port)))
            for _ in range(100)
        ]
        with dial(("127.0.0.1", guard.port), KEY, echo, PATIENCE_SECONDS) as peer:
            peer.sendall(b"alive")
            assert received(peer, 5) == b"alive"
        strangers[-1].settimeout(0.01)
        with pytest.raises(TimeoutError):  # the latest are listened to on
            strangers[-1].recv(1)
        assert received(strangers[0], 1) == b""


def test_another_key_is_refused_on_both_sides(echo):
    guard = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], PATIENCE_SECONDS)
    with pytest.raises(Refused, match="its key is another"):
        dial(("127.0.0.1", guard.port), bytes(32), echo, PATIENCE_SECONDS)


def test_a_port_that_is_not_the_engines_is_out_of_reach(echo):
    guard = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)
    with dial(("127.0.0.1", guard.port), KEY, echo, PATIENCE_SECONDS) as peer:
        assert received(peer, 1) == b""


def test_a_guard_is_a_process_that_ends_with_its_owner(echo):
    guard = GuardProcess(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], PATIENCE_SECONDS)
    with dial(guard.address, KEY, echo, PATIENCE_SECONDS) as peer:
        peer.sendall(b"alive")
        assert received(peer, 5) == b"alive"
        guard.close()
        assert received(peer, 1) == b""


def test_an_address_of_another_host_is_refused():
    with pytest.raises(UserError, match=r"cannot listen at 192\.0\.2\.1 .*this host's tunnel"):
        GuardProcess(KEY, ("192.0.2.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)


def test_a_guard_that_is_killed_says_how_it_ended():
    others = set(family(os.getpid()))
    guard = GuardProcess(KEY, ("127.0.0.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)
    assert guard.failure is None
    (process,) = set(family(os.getpid())) - others
    os.kill(process, signal.SIGKILL)
    assert guard.ended.wait(PATIENCE_SECONDS)
    assert guard.failure == f"the guard of this process, {process}, has ended (signal 9, Killed)"
    guard.close()
    guard = GuardProcess(KEY, ("127.0.0.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)
    guard.close()
    assert guard.failure is None, "it was asked to end"


def test_a_guard_listens_at_the_port_that_it_is_given_or_says_that_it_is_taken(monkeypatch):
    monkeypatch.setattr("geojax.transport.guard._PORT_SECONDS", 0.0)
    port = free_port()
    guard = GuardProcess(KEY, ("127.0.0.1", port), "127.0.0.1", [], PATIENCE_SECONDS)
    assert guard.address == ("127.0.0.1", port)
    with pytest.raises(OSError, match="Address already in use"):
        Guard(KEY, ("127.0.0.1", port), "127.0.0.1", [], PATIENCE_SECONDS)
    guard.close()


def test_bytes_that_come_from_a_peer_are_reported(echo):
    there = Guard(KEY, ("127.0.0.1", 0), "127.0.0.1", [echo], PATIENCE_SECONDS)
    here = GuardProcess(KEY, ("127.0.0.1", 0), "127.0.0.1", [], PATIENCE_SECONDS)
    heard = threading.Event()
    here.forward(("127.0.0.1", there.port), "127.9.9.5", [echo], heard.set)
    with socket.create_connection(("127.9.9.5", echo)) as connection:
        connection.sendall(b"alive")
        assert received(connection, 5) == b"alive"
        assert heard.wait(PATIENCE_SECONDS)
    here.close()
