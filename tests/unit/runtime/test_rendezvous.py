"""Processes of one job meet; here each is a thread, which makes no difference to the sockets."""

import concurrent.futures
import re
import resource
import socket
import time

import jax
import pytest
from support.ports import free_port
from support.processes import PATIENCE_SECONDS

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.runtime.rendezvous import Presence, client, join, messages, server
from geojax.runtime.rendezvous.client import join_server
from geojax.runtime.rendezvous.sockets import allow_connections
from geojax.runtime.start import _check_addresses, _own_devices


@pytest.fixture
def coordinator():
    return f"127.0.0.1:{free_port()}"


def meet(*calls, timeout=60.0):
    """The outcome (everyone or the exception) of each (process, count, address, site) call."""

    def call(arguments):
        process, count, address, site = arguments
        try:
            return join(process, count, address, site, timeout)
        except (UserError, RunError) as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(call, calls))


def join_soon(connect):
    """The connection to a process that is about to listen."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return connect()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(("process", "missing"), [(0, "1, 2"), (2, "0")])
def test_a_process_that_waits_long_says_once_for_whom(
    process, missing, coordinator, monkeypatch, capsys
):
    for end in (client, server):
        monkeypatch.setattr(end, "SAY_SECONDS", 0.2)
    with pytest.raises(MissingProcessesError):
        join(process, 3, coordinator, "east", 2.0)
    assert capsys.readouterr().err == f"waiting for process {missing}, 2 s at most\n"


def test_everyone_hears_where_everyone_is(coordinator):
    sites = ["east", "west", "east", "west"]
    outcomes = meet(*((i, 4, coordinator, sites[i]) for i in (3, 1, 0, 2)))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    processes = outcomes[0].processes
    assert [presence.process for presence in processes] == [0, 1, 2, 3]
    assert [presence.site for presence in processes] == sites
    assert {presence.host for presence in processes} == {socket.gethostname()}
    assert len(outcomes[0].key) == 32


def test_the_port_is_free_again_at_once(coordinator):
    for _ in range(2):
        meet(*((i, 2, coordinator, None) for i in range(2)))


def test_who_did_not_come_is_named_on_every_side(coordinator):
    outcomes = meet(*((i, 5, coordinator, None) for i in (0, 2, 4)), timeout=3.0)
    for outcome in outcomes:
        assert isinstance(outcome, MissingProcessesError)
        assert outcome.missing == (1, 3)
        assert "2 of 5 processes did not start within 3 seconds: missing process 1, 3" in str(
            outcome
        )


def test_a_coordinator_that_never_comes_is_named(coordinator):
    started = time.monotonic()
    with pytest.raises(MissingProcessesError, match=f"process 0 at {coordinator}") as caught:
        join(1, 2, coordinator, None, 0.5)
    assert caught.value.missing == (0,)
    assert time.monotonic() - started < 60


def test_a_coordinators_name_without_an_address_is_named_not_the_process(monkeypatch):
    asked = []

    def nobody(*_, **__):
        asked.append(1)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(MissingProcessesError, match=r"pod-0\.x, had no address within 0\.5 s"):
        join(1, 2, "pod-0.x:5000", None, 0.5)
    assert len(asked) > 1, "a pod gets its name late"
    with pytest.raises(RunError, match=r"name, pod-0\.x, has no address on the host of process 0"):
        join(0, 2, "pod-0.x:5000", None, 0.2)


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


def test_a_port_in_use_is_said(coordinator):
    occupied = socket.create_server(("127.0.0.1", int(coordinator.split(":")[1])))
    with occupied, pytest.raises(UserError, match="cannot listen on port"):
        join(0, 2, coordinator, None, 1.0)


def test_more_processes_than_open_files_can_connect():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        allow_connections(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (812, hard)
        allow_connections(100)  # it is never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (812, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_limit_of_files_that_cannot_be_raised_is_said(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    limits = []

    def set_limit(_, limit):
        if limit[1] > 4096:
            raise PermissionError
        limits.append(limit)

    monkeypatch.setattr(resource, "setrlimit", set_limit)
    allow_connections(4000)  # a few files fewer than usual
    assert limits == [(4096, 4096)]
    with pytest.raises(UserError, match=r"may open 4096 files, and 8000 processes .* to 8512"):
        allow_connections(8000)


def test_unequal_versions_are_refused_in_one_line(coordinator):
    newer = messages.own_hello(1, 2, None).model_copy(update={"versions": {"jax": "9.9.9"}})
    host, port = coordinator.split(":")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, 0, 2, coordinator, None, PATIENCE_SECONDS)
        with pytest.raises(UserError) as told:
            join_server(newer, host, int(port), b"", 60.0, time.monotonic() + 60, print)
        with pytest.raises(UserError) as raised:
            first.result()
    assert str(told.value) == str(raised.value)
    assert re.search(
        rf"process 1 .* runs jax 9\.9\.9, but process 0 .* jax {jax.__version__}, jaxlib",
        str(told.value),
    )
    assert "\n" not in str(told.value)


def test_the_port_is_open_at_the_address_asked_for_only(coordinator):
    port = int(coordinator.split(":")[1])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, 0, 2, coordinator, None, PATIENCE_SECONDS)
        other = join_soon(lambda: socket.create_connection(("127.0.0.1", port), 5))
        with other, pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
        join(1, 2, coordinator, None, PATIENCE_SECONDS)
        first.result()


def test_a_coordinator_elsewhere_is_said():
    with pytest.raises(UserError, match=r"192\.0\.2\.1, is none of the host of process 0, .*BIND"):
        join(0, 2, "192.0.2.1:61440", None, 1.0)
    translated = f"192.0.2.1:{free_port()}"
    with pytest.raises(MissingProcessesError, match="missing process 1"):
        join(0, 2, translated, None, 0.2, bind_address="127.0.0.1")


def presence(process, host="a", gpus=None, address="10.0.0.1"):
    return Presence(process=process, host=host, gpus=gpus, address=address)


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
