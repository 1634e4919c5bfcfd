"""Doors of a run that goes on: who asks there, who comes in, and who does not."""

import concurrent.futures
import contextlib
import socket

import pytest
from support.ports import free_port
from support.processes import wait_until

from geojax.errors import RunError
from geojax.job.island_env import IslandSettings
from geojax.transport import Membership, Streams
from geojax.transport.carrier import Limits
from geojax.transport.connect import begin
from geojax.transport.door import Door, ask_doors, enter
from geojax.transport.endpoint import ProcessOfSite, processes_of

SITES = ("east", "mid", "west")
LIMITS = Limits(Streams(1, 1 << 18), 1 << 20, 20.0, goes_on=True)


def place(site, doors, key="k" * 32):
    return IslandSettings(site=site, sites=SITES, coordinators=doors, key=key, address="127.0.0.1")


@pytest.fixture
def doors():
    return tuple(f"127.0.0.1:{free_port()}" for _ in SITES)


@contextlib.contextmanager
def living(site, doors):
    joined = begin(Membership(place(site, doors), 0, 1, {}), LIMITS)
    own = ProcessOfSite("here", joined.endpoint.text())
    door = Door(joined.members.island, [own], f"facts of {site}")
    try:
        yield joined, door
    finally:
        door.close()
        joined.transport.close(failed=True)


def test_a_site_learns_the_facts_and_comes_in_where_somebody_lives(doors):
    with living("mid", doors) as (joined, door):
        answers = ask_doors(place("east", doors))
        assert {site: answer.facts for site, answer in answers.items()} == {"mid": "facts of mid"}
        assert door.arrivals.empty(), "who only asks is not taken up"
        back = begin(Membership(place("east", doors), 0, 1, {}), LIMITS)

        def admit():
            if door.arrivals.empty():
                return False
            guest = door.arrivals.get()
            group = SITES.index(guest.site)
            joined.transport.take_up(joined.peers(group, processes_of(guest.endpoint, "east")))
            return True

        with contextlib.ExitStack() as stack:
            stack.callback(back.transport.close, failed=True)
            admitted = stack.enter_context(_in_thread(lambda: wait_until(admit)))
            enter(back, 20.0)
            admitted()
            assert list(back.transport.links) == [SITES.index("mid")]
            joined.transport.note(0, b"welcome")
            wait_until(lambda: not back.transport.notes.empty())
            assert back.transport.notes.get() == (1, b"welcome")


@contextlib.contextmanager
def _in_thread(call):
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        yield threads.submit(call).result


def _sends(host, port, rubbish):
    """Send rubbish to a port; return whether somebody listens there, as a door does at times."""
    try:
        stranger = socket.create_connection((host, port))
    except ConnectionRefusedError:
        return False
    with stranger:
        stranger.sendall(rubbish)
    return True


def test_strangers_and_another_key_learn_nothing(doors):
    with living("mid", doors) as (_, door):
        host, port = doors[1].split(":")
        for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 14), b"\n" * 100):
            wait_until(lambda sent=rubbish: _sends(host, int(port), sent))
        assert ask_doors(place("east", doors, key="x" * 32), seconds=1.0) == {}
        assert door.arrivals.empty()
        assert list(ask_doors(place("west", doors))) == ["mid"]


def test_a_site_to_which_nobody_answers_says_so(doors):
    assert ask_doors(place("east", doors), seconds=0.2) == {}
    back = begin(Membership(place("east", doors), 0, 1, {}), LIMITS)
    with pytest.raises(RunError, match="no other site of the run that goes on answers"):
        enter(back, 1.0)


def test_a_door_whose_port_is_taken_says_so_and_opens_later(doors):
    host, port = doors[1].split(":")
    with socket.create_server((host, int(port))), living("mid", doors) as (_, door):
        wait_until(lambda: door.problem is not None)
        assert f"cannot listen on port {port}" in door.problem
