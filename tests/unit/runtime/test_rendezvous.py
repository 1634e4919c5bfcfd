"""Processes of one job meet; here each is a thread, which makes no difference to the sockets."""

import concurrent.futures
import contextlib
import resource
import socket
import threading
import time

import pytest

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.runtime import rendezvous
from geojax.runtime.rendezvous import join
from geojax.runtime.start import _check_addresses, _own_devices


@pytest.fixture
def coordinator():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def meet(*calls, timeout=10.0):
    """The outcome (a list of presences or the exception) of each (process, count, site) call."""

    def call(arguments):
        process, count, address, site = arguments
        try:
            return join(process, count, address, site, timeout)
        except (UserError, RunError) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


def test_everyone_hears_where_everyone_is(coordinator):
    sites = ["east", "west", "east", "west"]
    outcomes = meet(*((i, 4, coordinator, sites[i]) for i in (3, 1, 0, 2)))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert [presence["process"] for presence in outcomes[0]] == [0, 1, 2, 3]
    assert [presence["site"] for presence in outcomes[0]] == sites
    assert {presence["host"] for presence in outcomes[0]} == {socket.gethostname()}


def test_the_port_is_free_again_at_once(coordinator):
    for _ in range(2):
        meet(*((i, 2, coordinator, None) for i in range(2)))


def test_who_did_not_come_is_named_on_every_side(coordinator):
    outcomes = meet(*((i, 5, coordinator, None) for i in (0, 2, 4)), timeout=1.0)
    for outcome in outcomes:
        assert isinstance(outcome, MissingProcessesError)
        assert outcome.missing == (1, 3)
        assert "2 of 5 processes did not start within 1 seconds: missing process 1, 3" in str(
            outcome
        )


def test_a_coordinator_that_never_comes_is_named(coordinator):
    started = time.monotonic()
    with pytest.raises(MissingProcessesError, match=f"process 0 at {coordinator}") as caught:
        join(1, 2, coordinator, None, 0.5)
    assert caught.value.missing == (0,)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("calls", "part"),
    [
        ([(0, 3, None), (1, 3, None), (1, 3, None)], "two processes say that they are number 1"),
        ([(0, 2, None), (1, 3, None)], "as one of 3 processes"),
        ([(0, 2, "east"), (1, 2, None)], "process 1 names no site"),
    ],
)
def test_processes_that_do_not_fit_together_all_hear_why(coordinator, calls, part):
    outcomes = meet(*((process, count, coordinator, site) for process, count, site in calls))
    for outcome in outcomes:
        assert isinstance(outcome, UserError)
        assert part in str(outcome)


def test_a_process_that_died_may_come_again_and_strangers_are_ignored(coordinator):
    host, port = coordinator.split(":")

    def strangers():
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"process": 1}\n', b"[]\n", b""):
            while True:
                with contextlib.suppress(OSError):
                    with socket.create_connection((host, int(port)), timeout=5) as connection:
                        connection.sendall(words)
                    break
                time.sleep(0.05)
        first = b'{"process": 1, "count": 2, "site": null, "host": "h", "token": "t"}\n'
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(first[:20])
            time.sleep(0.1)
            connection.sendall(first[20:-1])  # dies in the middle of its line

    thread = threading.Thread(target=strangers)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        desk = pool.submit(join, 0, 2, coordinator, None, 20.0)
        thread.start()
        thread.join()
        join(1, 2, coordinator, None, 10.0)
        assert [presence["process"] for presence in desk.result()] == [0, 1]


def test_a_port_in_use_is_said(coordinator):
    occupied = socket.create_server(("127.0.0.1", int(coordinator.split(":")[1])))
    with occupied, pytest.raises(UserError, match="cannot listen on port"):
        join(0, 2, coordinator, None, 1.0)


def test_more_processes_than_open_files_can_connect():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        rendezvous._allow_open_files(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
        rendezvous._allow_open_files(100)  # it is never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def presence(process, host="a", gpus=None, address="10.0.0.1"):
    return {"process": process, "host": host, "gpus": gpus, "address": address}


def test_processes_that_see_the_same_gpus_take_one_each():
    four = [presence(process, "ab"[process // 2], gpus="0,1") for process in range(4)]
    assert [_own_devices(process, four) for process in range(4)] == [[0], [1], [0], [1]]
    # A launcher has given each its own, or there are more of them than processes.
    assert _own_devices(0, [presence(0, gpus="0,1"), presence(1, gpus="2,3")]) is None
    assert _own_devices(0, [presence(0, gpus="0,1,2,3"), presence(1, gpus="0,1,2,3")]) is None
    assert _own_devices(0, [presence(0), presence(1)]) is None


def test_a_host_whose_name_leads_nowhere_else_is_named():
    elsewhere = presence(1, "west1")
    _check_addresses([presence(0, "east1"), elsewhere])
    _check_addresses([presence(0, "one", address="127.0.1.1")] * 2)
    for address, leads in (("127.0.1.1", "to 127.0.1.1"), (None, "nowhere")):
        with pytest.raises(UserError, match=f"its host, east1, leads {leads} on that host"):
            _check_addresses([presence(0, "east1", address=address), elsewhere])
