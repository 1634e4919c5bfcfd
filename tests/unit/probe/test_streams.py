import threading

import pytest
from support.processes import PATIENCE_SECONDS

from geojax.errors import RunError
from geojax.probe import streams
from geojax.probe.figures import ProbedLink
from geojax.probe.run import judged_links
from geojax.topology import Topology

TOKEN = b"0123456789abcdef"


@pytest.fixture
def listener():
    listener = streams.Listener("127.0.0.1", TOKEN, "the caller")
    yield listener
    listener.close()


def dial(listener, token=TOKEN):
    return streams.call("127.0.0.1", ("127.0.0.1", listener.port), token, "the listener")


def test_the_address_that_faces_a_host():
    assert streams.own_address("localhost") == "127.0.0.1"
    with pytest.raises(RunError, match=r"faces the coordinator nowhere\.invalid"):
        streams.own_address("nowhere.invalid")


def test_a_stranger_is_not_taken_for_the_peer(listener):
    with (
        dial(listener, b"x" * len(TOKEN)),
        dial(listener) as ours,
        listener.accept() as accepted,
    ):
        assert accepted.getpeername() == ours.getsockname()


def test_who_does_not_connect_or_listen_is_named(listener, monkeypatch):
    monkeypatch.setattr(streams, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(RunError, match=r"the caller did not connect within 0\.1 seconds"):
        listener.accept()
    listener.close()
    with pytest.raises(RunError, match=r"the listener cannot be reached at 127\.0\.0\.1: "):
        dial(listener)


def test_round_trip_is_known_at_both_ends(listener):
    with dial(listener) as here, listener.accept() as there:
        found = []
        other = threading.Thread(target=lambda: found.append(streams.answer(there, "here")))
        other.start()
        seconds = streams.round_trip(here, "there")
        other.join()
        assert found == [seconds]
        assert 0 < seconds < 60
        assert 0.9 < streams.packet_share(here) < 1


def test_bytes_are_counted_and_the_sender_ends(listener, monkeypatch):
    monkeypatch.setattr(streams.time, "sleep", lambda seconds: threading.Event().wait(0.02))
    pairs = [(dial(listener), listener.accept()) for _ in range(2)]
    sender = threading.Thread(target=streams.send, args=([pair[0] for pair in pairs], "there"))
    sender.start()
    rate = streams.receive([pair[1] for pair in pairs], 0.0, "here")
    sender.join(timeout=PATIENCE_SECONDS)
    assert not sender.is_alive()
    assert rate > 0
    for here, _ in pairs:
        here.close()


def test_a_link_that_carries_nothing_is_named(listener, monkeypatch):
    monkeypatch.setattr(streams.time, "sleep", lambda seconds: None)
    with dial(listener), pytest.raises(RunError, match="nothing arrives from the caller"):
        streams.receive([listener.accept()], 0.0, "the caller")


def figures(source, target, rate, trip=0.021):
    return ProbedLink(
        source=source,
        target=target,
        round_trip_seconds=trip,
        bytes_per_second={1: rate / 2, 4: rate},
        packet_share=0.965,
    )


def verdicts(*links, described_by=None, hosts=1):
    return [link.verdict for link in judged_links(links, described_by, hosts)]


def test_a_link_is_judged_by_its_description_or_by_the_others():
    there, back = figures("east", "west", 1e8), figures("west", "east", 1e8)
    assert verdicts(there, back) == ["ok", "ok"]
    assert verdicts(there, figures("west", "east", 5e7)) == ["ok", "slow"]
    described = Topology.load("simulated-2x4")  # 21 ms, 10 Gbit/s
    assert verdicts(there, back, described_by=described) == ["slow", "slow"]
    full = 0.965 * 10e9 / 8
    fast = [figures("east", "west", full), figures("west", "east", full, trip=0.025)]
    assert verdicts(*fast, described_by=described) == ["ok", "slow"]
    # Of four hosts one was measured, which has a quarter of the link.
    quarter = figures("east", "west", full / 4)
    assert verdicts(quarter, described_by=described, hosts=4) == ["ok"]
