"""`geojax probe` in real processes: over an emulated link (needs root), and with one slowed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.emulated_link import skip_unless_possible
from support.small_runs import environment

from geojax.exit_codes import UNHEALTHY
from geojax.topology import Topology
from geojax.wan import WanSettings, bring_up, take_down

pytestmark = pytest.mark.measures

NAME = f"probe-{os.getpid()}"
ROUND_TRIP, RATE = 0.021, 200e6 / 8


@pytest.fixture
def wan():
    skip_unless_possible(NAME)
    settings = WanSettings(round_trip_seconds=ROUND_TRIP, bytes_per_second=RATE)
    yield bring_up(settings, NAME)
    take_down(NAME)


def probe(*options: str, launch: tuple[str, ...] = ()) -> subprocess.Popen:
    line = [sys.executable, "-m", "geojax", "launch", "--devices-per-process", "1", *launch]
    return subprocess.Popen(
        [*line, "--", "probe", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_link_has_the_round_trip_and_the_rate_that_were_set(wan, tmp_path):
    figures, topology = tmp_path / "figures.json", tmp_path / "measured.yaml"
    options = ("--checks", "links", "hosts", "--streams", "4")
    written = ("--json", str(figures), "--output", str(topology))
    process = probe(*options, *written, launch=("--wan", "--wan-name", NAME))
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    assert re.search(r"east/0 \| east +west +2\d\.?\d* ms +1\d\d Mbit/s .* ok", printed), printed
    found = json.loads(figures.read_text())
    assert [(link["source"], link["target"]) for link in found["links"]] == [
        ("east", "west"),
        ("west", "east"),
    ]
    for link in found["links"]:
        assert link["round_trip_seconds"] == pytest.approx(ROUND_TRIP, rel=0.05)
        assert link["packet_share"] == pytest.approx(1448 / 1500)
        payload = link["bytes_per_second"]["4"]
        assert payload / link["packet_share"] == pytest.approx(RATE, rel=0.05)
    buffers = {host["receive_buffer_bytes"] for host in found["hosts"]}
    assert buffers == {2**24}  # those of the namespaces
    measured = Topology.load(topology).link("east", "west")
    assert measured.round_trip_seconds == pytest.approx(ROUND_TRIP, rel=0.05)


def process_of(launcher: subprocess.Popen, number: int) -> int:
    """The process with that number of the run, by what it and its reaper inherit."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
            reaper = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            above = Path(f"/proc/{reaper}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        is_probe = words[1:4] == [b"-m", b"geojax", b"probe"] and int(above) == launcher.pid
        if is_probe and f"GEOJAX_PROCESS_ID={number}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no process {number}")


def test_a_device_that_is_slowed_down_is_flagged(tmp_path):
    """Its process is stopped for most of the time, as one that is throttled would be."""
    figures = tmp_path / "figures.json"
    launcher = probe("--checks", "devices", "--json", str(figures))
    lines = []
    while not lines or "process" not in lines[-1] or "east/0" not in lines[-1]:
        lines.append(launcher.stdout.readline())
        assert lines[-1], lines
    slowed = process_of(launcher, 1)
    try:
        while launcher.poll() is None and Path(f"/proc/{slowed}").exists():
            os.kill(slowed, signal.SIGSTOP)
            time.sleep(0.06)
            os.kill(slowed, signal.SIGCONT)
            time.sleep(0.01)
    except ProcessLookupError:
        pass  # it has ended
    printed = "".join(lines) + launcher.communicate(timeout=300)[0]
    assert launcher.returncode == UNHEALTHY, printed
    assert "last lines" not in printed, "an answer is not a crash"
    found = json.loads(figures.read_text())
    assert [device["verdict"] for device in found["devices"]] == ["ok", "slow"], printed
    (sentence,) = found["flagged"]
    assert re.fullmatch(r"device \d+ \(site west, host \S+, process 1\) is slow", sentence)
    assert f"east/0 | slow: {sentence}" in printed
