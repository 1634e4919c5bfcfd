"""Two runtimes joined by the transport over an emulated link; needs root."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.emulated_link import skip_unless_possible

from geojax.wan import WanSettings, bring_up, cut, restore, take_down

pytestmark = pytest.mark.measures

NAME = f"transport-{os.getpid()}"
WORKER = Path(__file__).with_name("transport_worker.py")


@pytest.fixture(scope="module")
def wan():
    skip_unless_possible(NAME)
    try:
        yield bring_up(WanSettings(round_trip_seconds=0.021, bytes_per_second=125e6), NAME)
    finally:
        take_down(NAME)


class Site:
    """A worker in one site."""

    def __init__(self, wan, site, port, steps, seconds):
        worker = [sys.executable, str(WORKER), str(site)]
        self.process = subprocess.Popen(
            [
                *wan.sites[site].command_prefix,
                *worker,
                f"{wan.sites[0].address}:{port}",
                str(steps),
                str(seconds),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_until(self, pattern):
        """The first line that matches, or all that was said if none does."""
        said = []
        for line in self.process.stdout:
            said.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError("".join(said))


@pytest.fixture
def start(wan):
    sites = []

    def begin(port, steps, seconds):
        sites.extend(Site(wan, site, port, steps, seconds) for site in range(2))
        return sites

    yield begin
    for site in sites:
        site.process.kill()
        site.process.communicate()


def test_rubbish_at_the_port_and_a_cut_of_five_seconds_do_no_harm(wan, start):
    east, west = start(7101, 60, 0.02)
    address, port = east.read_until(r"guard (\S+) (\d+)").groups()
    east.read_until("step 10")
    for rubbish in (b"\0\0\0\0", os.urandom(5000)):
        thrown = f"import socket; s = socket.create_connection(({address!r}, {port})); "
        thrown += f"s.sendall({rubbish!r}); s.close()"
        subprocess.run([*wan.sites[1].command_prefix, sys.executable, "-c", thrown], check=True)
    east.read_until("step 20")
    cut(wan, wan.links[0])
    time.sleep(5)
    restore(wan, wan.links[0])
    for site in (east, west):
        site.read_until("done")
        assert site.process.wait(30) == 0


def test_a_site_that_is_killed_is_named(start):
    east, west = start(7102, 10_000, 0.02)
    east.read_until("step 10")
    west.process.kill()
    host = re.escape(socket.gethostname())
    east.read_until(rf"transport: .*site west \(process 0, host {host}\)")
    assert east.process.wait(30) == 1
