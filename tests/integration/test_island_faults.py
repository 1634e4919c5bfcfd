"""Islands under strangers, a cut, a silent site, a killed one, Ctrl-C, and a second start."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.full_disk import EMPTY_AT, small_disk, train_with_a_full_disk
from support.island_jobs import SETTINGS, STAGES, start_sites
from support.processes import family, is_running, open_sockets, wait_until
from support.small_runs import (
    environment,
    finish,
    losses,
    saved_steps,
    wait_for,
    wait_for_step,
    write_config,
)

LONG = SETTINGS | {
    "steps": 100_000,
    "simulate_devices": 1,
    "mesh": {"dc": 2},
    "evaluation": {"interval": 100_000, "sequences": 8},
    "checkpoint": {"interval": 5},
}
RUBBISH = (bytes(4), bytes(1 << 16), b"GET / HTTP/1.1\r\n\r\n", b"geojax/1" + bytes(18))


def listening(process):
    """Address and port of each socket on which a process or one of its own waits for others.

    Those on loopback addresses of its own, which no other host reaches, are left out.
    """
    inodes = set().union(*map(open_sockets, family(process)))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = []
    for row in rows:
        address, port = row[1].split(":")
        host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
        if row[3] == "0A" and row[9] in inodes and (host == "127.0.0.1" or host[:4] != "127."):
            found.append((host, int(port, 16)))
    return found


def signal_all(processes, number):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def holder_of(run):
    """The process that holds the lock of a run's folder."""
    holder = re.search(r"process (\d+)", (run / "lock").read_text())
    assert holder, "the lock names its holder"
    return int(holder[1])


def step_of(run):
    return max(losses(run))


@pytest.fixture
def stages(corpus, tmp_path):
    """A config, its folder, and two jobs that train it as stages."""
    config = write_config(tmp_path / "run.yaml", corpus, **STAGES | LONG | {"dc": STAGES["dc"]})
    sites = start_sites(config)
    try:
        wait_for_step(tmp_path / "run" / "east", 2, sites[0])
        yield config, tmp_path / "run", sites
    finally:
        for site in sites:
            site.kill()
        finish(*sites)


def test_a_run_goes_on_beside_strangers_and_after_a_cut_and_stops_at_all_sites(stages):
    config, run, (east, west) = stages
    ports = listening(east.pid) + listening(west.pid)
    assert len(ports) >= 2, "a port at each site"
    with contextlib.ExitStack() as held:
        for port in ports:
            for rubbish in RUBBISH:
                stranger = held.enter_context(socket.create_connection(port, 5))
                stranger.sendall(rubbish)
        wait_for_step(run / "east", step_of(run / "east") + 2, east)
    again = start_sites(config)
    for output, process in zip(finish(*again), again, strict=True):
        assert process.returncode == 2, output
        assert re.search(r"error: .* in use .* process \d+", output), output
    stopped = family(west.pid)
    signal_all(stopped, signal.SIGSTOP)
    time.sleep(5)
    signal_all(stopped, signal.SIGCONT)
    wait_for_step(run / "east", step_of(run / "east") + 2, east)
    everyone = family(east.pid) + family(west.pid)
    west.send_signal(signal.SIGINT)
    for output, process in zip(finish(east, west), (east, west), strict=True):
        assert process.returncode == 130, output
        assert "stopped at step" in output
    wait_until(lambda: not any(map(is_running, everyone)), "the jobs leave processes behind")
    last = step_of(run / "east")
    assert (last, saved_steps(run)[-1]) == (step_of(run / "west"), last)


def test_a_silent_site_and_a_killed_one_are_named_and_all_sites_start_again(corpus, tmp_path):
    config = write_config(tmp_path / "run.yaml", corpus, **LONG)
    run, log = tmp_path / "run", tmp_path / "log"
    line = [sys.executable, "-m", "geojax", "launch", "--islands", "--restarts", "2"]
    line += ["--grace-seconds", "2", "--", "train", str(config)]
    with log.open("wb") as file:
        launcher = subprocess.Popen(
            line,
            env=environment(GEOJAX_HEARTBEAT_TIMEOUT="10"),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_step(run / "west", 6, launcher)
            os.kill(holder_of(run / "west"), signal.SIGSTOP)
            wait_for(lambda: log.read_bytes().count(b"resuming from step") == 2, launcher)
            wait_for_step(run / "east", step_of(run / "east") + 2, launcher)
            os.kill(holder_of(run / "west"), signal.SIGKILL)
            # The launcher repeats the last lines of the killed process, so that counting is vain.
            wait_for(lambda: b"restart 2 of 2" in log.read_bytes(), launcher)
            wait_for_step(run / "east", step_of(run / "east") + 2, launcher)
            launcher.send_signal(signal.SIGINT)
            launcher.wait(120)
        finally:
            launcher.kill()
    output = log.read_text()
    assert launcher.returncode == 130, output
    assert re.search(r"east/0 +\| error: transport: site west \(.*\) has been silent for", output)
    assert "geojax launch: process 1 (site west) was stuck, and killed" in output
    assert "geojax launch: restart 1 of 2" in output
    assert "geojax launch: restart 2 of 2" in output


def test_a_full_disk_at_one_site_costs_lines_and_no_step(corpus, tmp_path):
    short = LONG | {"steps": EMPTY_AT + 20, "checkpoint": {"interval": 10}}
    config = write_config(tmp_path / "run.yaml", corpus, **short)
    with small_disk(tmp_path / "small") as disk:
        if disk is None:
            pytest.skip("this user may not mount a file system")
        disturbed = train_with_a_full_disk(config, tmp_path, disk)
    sites = start_sites(config)
    for output, process in zip(finish(*sites), sites, strict=True):
        assert process.returncode == 0, output
    assert losses(tmp_path / "run" / "west") == disturbed
