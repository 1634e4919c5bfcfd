"""The port of a process: peers of this start get through, strangers do not and do no harm."""

import contextlib
import secrets
import socket
import threading
import time
from pathlib import Path

import pytest
from support.ports import free_port
from support.processes import PATIENCE_SECONDS

from geojax.errors import UserError
from geojax.transport.handshake import Party, PeerRoute, Refused, confirm, open_channel
from geojax.transport.peer_listener import PeerListener
from geojax.transport.tcp import dial

KEY = bytes(range(32))
OWN, PEER = Party(0, "own start"), Party(1, "peer's start")


@pytest.fixture
def port():
    """A listening port, and what a peer reaches behind it: a connection and what it says."""
    listener, adopted = PeerListener(("127.0.0.1", 0), KEY), []

    def adopt(connection, hello):
        confirm(connection, KEY, hello, 7, PATIENCE_SECONDS)
        adopted.append((connection, hello))

    listener.expect(PEER, adopt)
    listener.serve(OWN)
    yield listener.address, adopted
    listener.close()
    for connection, _ in adopted:
        connection.close()


def route(address, key=KEY, own=PEER, peer=OWN):
    return PeerRoute(key, own, peer, address, PATIENCE_SECONDS)


def opens(address):
    connection, count = open_channel(route(address), 3, 5, 11, PATIENCE_SECONDS)
    connection.close()
    return count == 7


def test_a_peer_says_what_it_opens_and_hears_what_has_come(port):
    address, adopted = port
    assert opens(address)
    ((_, hello),) = adopted
    assert (hello.group, hello.channel, hello.number, hello.received) == (1, 3, 5, 11)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": bytes(32)},
        {"own": Party(1, "an earlier start")},
        {"own": Party(2, "peer's start")},
        {"own": Party(1, "peer's start", process=1)},
        {"peer": Party(0, "an earlier start of the port")},
    ],
    ids=["another key", "an earlier start", "no peer", "another process", "a later start"],
)
def test_none_but_a_peer_of_this_start_gets_through(port, wrong):
    address, adopted = port
    with pytest.raises((Refused, OSError)):
        open_channel(route(address, **wrong), 0, 1, 0, PATIENCE_SECONDS)
    assert adopted == []
    assert opens(address)


def test_a_port_without_the_key_is_refused_by_the_peer():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            with contextlib.suppress(OSError):
                connection, _ = other.accept()
                with connection:
                    connection.sendall(secrets.token_bytes(16))
                    connection.recv(1 << 10)
                    connection.sendall(secrets.token_bytes(40))
                    connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Refused, match="its key is another"):
            open_channel(route(other.getsockname()), 0, 1, 0, PATIENCE_SECONDS)


def test_a_handshake_has_its_time_after_a_connection_that_came_late(port, monkeypatch):
    def late(address, seconds, pause):
        time.sleep(seconds)
        return dial(address, PATIENCE_SECONDS, pause)

    monkeypatch.setattr("geojax.transport.handshake.dial", late)
    address, _ = port
    connection, count = open_channel(route(address), 3, 5, 11, 0.5)
    connection.close()
    assert count == 7


@pytest.mark.parametrize("rubbish", [b"\0\0\0\0", bytes(36) + bytes(32), None])
def test_rubbish_ends_its_own_connection_alone(port, rubbish):
    address, adopted = port
    with socket.create_connection(address) as stranger:
        stranger.sendall(rubbish or secrets.token_bytes(4096))
        with contextlib.suppress(OSError):  # it may be closed already
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(PATIENCE_SECONDS)
            while stranger.recv(1 << 10):
                pass
    assert adopted == []
    assert opens(address)


def test_strangers_who_say_nothing_keep_no_peer_out(port):
    address, _ = port
    with contextlib.ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(address))
        assert opens(address)


def test_an_address_of_another_host_is_refused():
    with pytest.raises(UserError, match=r"cannot listen at 192\.0\.2\.1 .*this host's tunnel"):
        PeerListener(("192.0.2.1", 0), KEY)


def test_a_port_that_is_given_is_taken_or_said_to_be_in_use(monkeypatch):
    monkeypatch.setattr("geojax.transport.tcp._PORT_SECONDS", 0.0)
    number = free_port()
    listener = PeerListener(("127.0.0.1", number), KEY)
    assert listener.address == ("127.0.0.1", number)
    with pytest.raises(UserError, match=r"Address already in use.*GEOJAX_ISLANDS_PORT"):
        PeerListener(("127.0.0.1", number), KEY)
    listener.close()


def idle_timers(port):
    """The timers of the established connections to and from a port: 02 is that of a probe."""
    found = []
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, here, there, state, _, timer, *_ = line.split()
        if state == "01" and port in (int(end.partition(":")[2], 16) for end in (here, there)):
            found.append(timer[:2])
    return found


def test_both_ends_probe_an_idle_connection(port):
    address, _ = port
    connection, _ = open_channel(route(address), 0, 1, 0, PATIENCE_SECONDS)
    with connection:
        end = time.monotonic() + PATIENCE_SECONDS
        while idle_timers(address[1]) != ["02", "02"]:  # an acknowledgment may be under way
            assert time.monotonic() < end, idle_timers(address[1])
            time.sleep(0.01)
