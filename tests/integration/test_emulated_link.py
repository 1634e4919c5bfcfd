"""`geojax wan` with real namespaces and packets; needs root."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from support.emulated_link import skip_unless_possible
from support.processes import wait_until

from geojax.cli.main import run
from geojax.errors import RunError, UserError
from geojax.exit_codes import UNHEALTHY
from geojax.wan import (
    EmulatedWan,
    WanSettings,
    bring_up,
    is_cut,
    namespaces,
    problems,
    relay,
    running,
    take_down,
    traffic,
)
from geojax.wan.emulate import netem_arguments
from geojax.wan.state import state_path

pytestmark = pytest.mark.measures

NAME = f"test-{os.getpid()}"


@pytest.fixture(autouse=True)
def _possible_here():
    skip_unless_possible(NAME)
    yield
    take_down(NAME)


def left_over():
    """All that exists on this machine of the network under test."""
    files = map(str, state_path(NAME).parent.glob(f"{NAME}*"))
    return [*files, *namespaces.names_beginning(f"geojax.{NAME}.")]


def command(*arguments):
    """The exit code of `geojax wan ARGUMENTS` and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return run(["wan", *arguments, "--name", NAME]), printed.getvalue()


def test_a_link_has_the_round_trip_and_the_rate_that_were_asked():
    code, printed = command("up", "--rtt", "21ms", "--rate", "200mbit")
    assert code == 0
    assert re.search(r"\nrequested +21 ms  200 Mbit/s  200 Mbit/s +- +- +1\.57 MB\n", printed)
    assert re.search(r"\neast-west +2\d\.?\d* ms +\d+ Mbit/s +\d+ Mbit/s", printed)
    wan = running(NAME)
    (link,) = wan.links
    assert link.measured.round_trip_seconds == pytest.approx(0.021, rel=0.05)
    assert link.measured.bytes_per_second == pytest.approx((25e6, 25e6), rel=0.05)

    # Each site finds itself and the others under its own addresses.
    for site, other in (wan.sites, reversed(wan.sites)):
        for name, address in (
            (socket.gethostname(), site.address),
            (other.name, other.address),
            ("localhost", "127.0.0.1"),
        ):
            found = inside(site, f"import socket; print(socket.gethostbyname({name!r}))")
            assert found == address

    # What is sent is what arrives, and both are counted.
    before, (east, west) = traffic(wan), wan.sites
    listener = f"s = socket.create_server(({west.address!r}, 5555)); print(flush=True)"
    count = "c = s.accept()[0]; print(sum(iter(lambda: len(c.recv(2**20)), 0)))"
    receiver = subprocess.Popen(
        [*west.command_prefix, "python3", "-c", f"import socket; {listener}; {count}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    receiver.stdout.readline()
    inside(
        east,
        "import socket; socket.create_connection(('west', 5555)).sendall(bytes(4_000_000))",
    )
    assert receiver.communicate(timeout=60)[0] == "4000000\n"
    after = traffic(wan)
    sent = after["east"].sent_bytes - before["east"].sent_bytes
    assert sent == pytest.approx(4_000_000, rel=0.05)
    received = after["west"].received_bytes - before["west"].received_bytes
    assert received == pytest.approx(sent, rel=1e-3)  # the last acknowledgement is on its way

    with pytest.raises(UserError, match="is up already; geojax wan down"):
        bring_up(WanSettings(), NAME)
    code, printed = command("status")
    assert code == 0
    assert f"west  geojax.{NAME}.west  10.77.0.2" in printed
    assert command("down") == (0, f"removed the relay of east-west\n{removed('east', 'west')}")
    assert left_over() == []
    assert not relay.is_running(link.relay)
    assert command("down")[1] == f"no emulated network '{NAME}' was up\n"


def inside(site, program):
    """What a Python program prints in a site."""
    arguments = [*site.command_prefix, "python3", "-c", program]
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()


def removed(*sites):
    return "".join(f"removed the namespace geojax.{NAME}.{site}\n" for site in sites)


def nothing_crosses_a_link_that_was_cut(wan):
    """And what was open goes on when it is restored."""
    first, second = wan.sites[:2]
    with contextlib.ExitStack() as stack:
        with namespaces.inside(second.namespace):
            listener = stack.enter_context(socket.create_server((second.address, 0)))
        with namespaces.inside(first.namespace):
            here = stack.enter_context(socket.create_connection(listener.getsockname()))
        there = stack.enter_context(listener.accept()[0])
        there.settimeout(0.5)
        assert command("cut", "--link", "west-east") == (0, "cut the link east-west\n")
        here.sendall(b"?")
        with pytest.raises(TimeoutError):
            there.recv(1)
        assert [is_cut(wan, link) for link in wan.links] == [True, False, False]
        code, printed = command("status")
        assert (code, printed.count("cut: nothing crosses the link ")) == (0, 1)
        assert command("restore")[1].splitlines()[0] == "restored the link east-west"
        there.settimeout(30)
        assert there.recv(1) == b"?"
    assert not any(is_cut(wan, link) for link in wan.links)
    assert command("cut", "--link", "east-moon")[0] == 2


def test_three_sites_reach_each_other_are_cut_off_and_a_crash_is_cleaned_up():
    wan = bring_up(WanSettings(sites=3, bytes_per_second=1e8), NAME)
    assert [link.sites for link in wan.links] == [
        ("east", "west"),
        ("east", "north"),
        ("west", "north"),
    ]
    assert all(min(link.measured.bytes_per_second) > 0 for link in wan.links)
    nothing_crosses_a_link_that_was_cut(wan)
    os.kill(wan.links[1].relay.process_id, signal.SIGKILL)
    wait_until(lambda: problems(wan) == ["the relay of the link east-north has ended"])
    with pytest.raises(UserError, match="is broken: the relay of the link east-north has ended"):
        running(NAME)
    code, printed = command("status")
    assert code == UNHEALTHY
    assert "broken: the relay of the link east-north has ended; geojax wan up" in printed

    # The next one removes what is left, also where the one that made it never came to its end.
    unfinished = [link.model_copy(update={"measured": None}) for link in wan.links]
    wan.model_copy(update={"links": tuple(unfinished)}).save()
    again = bring_up(WanSettings(), NAME)
    assert again == EmulatedWan.load(NAME)
    assert not any(relay.is_running(link.relay) for link in wan.links)
    assert namespaces.names_beginning(f"geojax.{NAME}.") == [
        f"geojax.{NAME}.east",
        f"geojax.{NAME}.west",
    ]
    assert again.shaper == "none"
    assert again.links[0].measured.round_trip_seconds < 0.01

    # Without its state a network is still known by its name.
    state_path(NAME).unlink()
    assert left_over() != []
    assert command("down") == (0, removed("east", "west"))
    assert left_over() == []


def test_where_the_kernel_has_netem_it_shapes_the_links(monkeypatch, tmp_path):
    # A tc that agrees to everything and writes down what it was told.
    written = tmp_path / "written"
    (tmp_path / "tc").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$*\" >> {written}\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    wan = bring_up(WanSettings(round_trip_seconds=0.004, loss=0.01), NAME)
    assert wan.shaper == "netem"
    assert wan.links[0].relay is None
    ends = [("east", "to-west"), ("west", "to-east")]
    assert written.read_text().splitlines()[2:] == [
        f"-n geojax.{NAME}.{site} qdisc add dev {device} root "
        + " ".join(netem_arguments(wan.settings))
        for site, device in ends
    ]
    take_down(NAME)
    assert left_over() == []


def test_nothing_is_left_where_it_cannot_come_up(monkeypatch):
    begin = relay.RelayStart.begin

    def begin_late(start):
        wait_until(lambda: not relay.is_running(start.relay))
        begin(start)

    monkeypatch.setattr(relay, "compiled", lambda: Path("/bin/false"))
    monkeypatch.setattr(relay.RelayStart, "begin", begin_late)
    settings = WanSettings(round_trip_seconds=0.01, bytes_per_second=1e8)
    with pytest.raises(RunError, match="relay of an emulated link ended at its start"):
        bring_up(settings, NAME)
    assert left_over() == []


def test_a_core_that_this_machine_lacks_is_refused():
    words = "core 4096 is not among those of this process, "
    with pytest.raises(UserError, match=words):
        bring_up(WanSettings(), NAME, core=4096)
    assert left_over() == []
