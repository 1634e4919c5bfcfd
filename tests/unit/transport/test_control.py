"""Control connections: opened anew when nothing comes back, by the peer alone, and without loss."""

import contextlib
import itertools
import socket
import threading
import time

import pytest
from support.ports import free_port
from support.processes import PATIENCE_SECONDS, wait_until
from support.tcp_resets import connections, reset

from geojax.transport.control import (
    _FRAME,
    MOST_CONTENT_BYTES,
    ControlConnection,
    _frames_and_contents,
    _packed,
    _with_content,
)
from geojax.transport.handshake import CONTROL, Party, PeerRoute, Refused, open_channel
from geojax.transport.message_id import FIRST_ID
from geojax.transport.peer_listener import PeerListener

KEY = bytes(range(32))
PARTIES = (Party(0, "east's start"), Party(1, "west's start"))


class Relay:
    """A way to a port, on which all that has been said is kept, and connections may go dead."""

    def __init__(self, port):
        self._listener, self._port = socket.create_server(("127.0.0.1", 0)), port
        self.address = self._listener.getsockname()
        self.dead = threading.Event()
        self.said = []
        self.passed = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Let nothing pass over the connections that there are; new ones work."""
        self.dead.set()
        self.dead = threading.Event()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self.passed += 1
                for source, target in ((near, far), (far, near)):
                    self.said.append(bytearray())
                    carried = (source, target, self.dead, self.said[-1])
                    threading.Thread(target=self._carry, args=carried, daemon=True).start()

    @staticmethod
    def _carry(source, target, dead, said):
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if dead.is_set():
                    time.sleep(PATIENCE_SECONDS)
                said += piece
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def ends(monkeypatch):
    """East, west and the relay by which east reaches west; both patient for a third of a second."""
    monkeypatch.setattr("geojax.transport.control._ANSWER_SECONDS", 0.3)
    monkeypatch.setattr("geojax.transport.control.heartbeat_seconds", lambda route: 0.05)
    listeners = [PeerListener(("127.0.0.1", 0), KEY) for _ in PARTIES]
    relay = Relay(listeners[1].address[1])
    addresses = (relay.address, listeners[0].address)
    controls = [
        ControlConnection(PeerRoute(KEY, own, peer, address, PATIENCE_SECONDS))
        for own, peer, address in zip(PARTIES, reversed(PARTIES), addresses, strict=True)
    ]
    for site, listener in enumerate(listeners):
        listener.expect(PARTIES[1 - site], controls[site].adopt)
        listener.serve(PARTIES[site])
    for control in controls:
        assert control.reached.wait(PATIENCE_SECONDS)
        assert control.was_reached.wait(PATIENCE_SECONDS)
    yield *controls, relay
    for control in controls:
        control.close(0.0)
    for listener in listeners:
        listener.close()


def test_a_connection_on_which_nothing_comes_back_is_opened_anew_without_loss(ends):
    east, west, relay = ends
    came = []
    west.acknowledged = came.append
    messages = range(FIRST_ID, FIRST_ID + 6000, 2)
    for message in messages:
        east.acknowledge(message)
        if message % 2000 == 1000:
            relay.cut()
            time.sleep(0.01)
    wait_until(lambda: len(came) >= len(messages))
    assert came == list(messages)
    assert relay.passed > 1
    assert (east.lost, west.lost) == (None, None)


def test_figures_come_between_frames_and_the_newest_count(ends):
    east, west, relay = ends
    came, told = [], []
    west.acknowledged, west.told = came.append, told.append
    for message in range(FIRST_ID, FIRST_ID + 400, 2):
        east.acknowledge(message)
        east.tell(b"figures of %d" % message)
        if message == FIRST_ID + 200:
            relay.cut()
    newest = b"x" * MOST_CONTENT_BYTES

    def are_all_here():
        east.tell(newest)  # what a cut has taken is not said again
        return len(came) >= 200 and newest in told

    wait_until(are_all_here)
    assert came == list(range(FIRST_ID, FIRST_ID + 400, 2))
    steps = [int(each.split()[-1]) for each in told if each != newest]
    assert steps == sorted(set(steps))
    assert west.lost is None
    assert [len(east.sockets) > 0, len(west.sockets) > 0] == [True, True]


def test_figures_are_split_where_packets_end_anywhere():
    said = b"".join(
        (_with_content(3, b""), _packed(FIRST_ID), _with_content(3, b"123456789"), _packed(b"note"))
    )
    wanted = [(3, b""), (FIRST_ID, b""), (3, b"123456789"), (4, b"note")]
    for cut in range(len(said)):
        first, rest = _frames_and_contents(said[:cut])
        last, left = _frames_and_contents(rest + said[cut:])
        assert ([*first, *last], left) == (wanted, b"")
    with pytest.raises(Refused, match="too large"):
        _frames_and_contents(_FRAME.pack(3) + _FRAME.pack(MOST_CONTENT_BYTES + 1))


def test_notes_come_once_and_in_order_though_connections_go_dead(ends):
    east, west, relay = ends
    came = []
    west.noted = came.append
    notes = [b"%d" % number * (1 + number % 9) for number in range(600)]
    for number, note in enumerate(notes):
        east.note(note)
        east.acknowledge(FIRST_ID)
        if number % 200 == 100:
            relay.cut()
            time.sleep(0.01)
    wait_until(lambda: len(came) >= len(notes))
    assert came == notes
    assert relay.passed > 1


def test_a_goodbye_is_heard_though_the_connection_is_dead(ends):
    east, west, relay = ends
    relay.cut()
    east.say_goodbye(finished=True)
    east.close(PATIENCE_SECONDS)
    assert west.finished


def test_connections_that_are_reset_again_and_again_lose_and_double_nothing(ends):
    east, west, _ = ends
    ports = {end._route.address[1] for end in (east, west)}
    came = [], []
    west.acknowledged, east.acknowledged = came[0].append, came[1].append
    messages = range(FIRST_ID, FIRST_ID + 4000, 2)
    for message in messages:
        east.acknowledge(message)
        west.acknowledge(message)
        if message % 800 == 0:
            reset(each for each in connections() if each.remote_port in ports)
    wait_until(lambda: min(map(len, came)) >= len(messages))
    assert came == (list(messages), list(messages))
    east.say_goodbye(finished=True)
    west.say_goodbye(finished=True)
    wait_until(lambda: east.finished and west.finished)
    assert (east.lost, west.lost) == (None, None)


@pytest.mark.parametrize(
    ("key", "party", "number"),
    [
        (bytes(32), PARTIES[0], 99),
        (KEY, Party(0, "an earlier start"), 99),
        (KEY, Party(2, "no peer"), 99),
        (KEY, PARTIES[0], 1),
    ],
    ids=["a stranger", "an earlier start", "no peer", "a connection that was overtaken"],
)
def test_none_but_the_peer_takes_a_connection_over(ends, key, party, number):
    east, west, relay = ends
    route = PeerRoute(key, party, PARTIES[1], relay.address, PATIENCE_SECONDS)
    with pytest.raises((Refused, OSError)):
        open_channel(route, CONTROL, number, 0, PATIENCE_SECONDS)
    came = []
    west.acknowledged = came.append
    before = relay.passed
    east.acknowledge(FIRST_ID)
    wait_until(lambda: came == [FIRST_ID])
    assert relay.passed == before, "the connection is still the one that there was"


def test_what_was_said_once_opens_no_connection_again(ends):
    east, west, relay = ends
    replayed = bytes(relay.said[0])
    with socket.create_connection(relay.address) as stranger:
        stranger.sendall(replayed)
        stranger.settimeout(PATIENCE_SECONDS)
        pieces = iter(lambda: stranger.recv(1 << 16), b"")
        assert len(b"".join(pieces)) == 16, "a challenge alone"
    came = []
    west.acknowledged = came.append
    east.acknowledge(FIRST_ID)
    wait_until(lambda: came == [FIRST_ID])


def test_many_strangers_at_the_port_keep_nobody_out(ends):
    east, _, relay = ends
    with contextlib.ExitStack() as held:
        for rubbish in itertools.islice(itertools.cycle([b"", b"\0" * 4, b"\xff" * 4096]), 30):
            stranger = held.enter_context(socket.create_connection(relay.address))
            with contextlib.suppress(OSError):  # it is refused while it speaks
                stranger.sendall(rubbish)
        passed = relay.passed
        reset(each for each in connections() if each.remote_port == relay.address[1])
        wait_until(lambda: relay.passed > passed and east.problem is None)
    assert east.lost is None


def test_a_peer_that_has_failed_is_lost_at_once(ends):
    east, west, _ = ends
    west.say_goodbye(finished=False)
    assert east.over.wait(PATIENCE_SECONDS)
    assert east.lost == "it has ended with an error"


def test_a_port_at_which_nobody_listens_is_named():
    port = free_port()
    east = ControlConnection(PeerRoute(KEY, *PARTIES, ("127.0.0.1", port), PATIENCE_SECONDS))
    assert east.over.wait(PATIENCE_SECONDS)
    assert east.lost == (
        f"it refuses connections at 127.0.0.1:{port}, so that its process has ended"
    )
    east.close(0.0)
