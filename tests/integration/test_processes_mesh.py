"""Real processes under jax.distributed on loopback: sites, barriers, start-up and watchdog."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ports import free_port

from geojax.exit_codes import HANG

WORKER = Path(__file__).with_name("mesh_worker.py")
TIMEOUT = {"GEOJAX_HEARTBEAT_TIMEOUT": "4"}


def run(*arguments, processes, count=None, devices=2, sites=None, stuck=(), **variables):
    """Runs the worker in each of `processes` of a job of `count`; returns (code, output, errors)
    of each. The `stuck` ones are killed when the others have ended."""
    count = count or len(processes)
    common = {key: value for key, value in os.environ.items() if not key.startswith("GEOJAX_")}
    common |= {
        "GEOJAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "GEOJAX_PROCESS_COUNT": str(count),
        "GEOJAX_KEY": secrets.token_hex(16),
        "GEOJAX_SIMULATE_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    } | variables
    running = []
    for index, process in enumerate(processes):
        own = {"GEOJAX_PROCESS_ID": str(process)}
        if sites is not None:
            own["GEOJAX_SITE"] = sites[index]
        running.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), *arguments],
                env=common | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for index in sorted(range(len(running)), key=lambda index: index in stuck):
            if index in stuck:
                running[index].kill()
            running[index].wait(timeout=240)
        outputs = [process.communicate() for process in running]
    finally:
        for process in running:
            process.kill()
    return [(p.returncode, *output) for p, output in zip(running, outputs, strict=True)]


def answers(outcomes):
    for code, _, errors in outcomes:
        assert code == 0, errors
    return [json.loads(output.splitlines()[-1]) for _, output, _ in outcomes]


def test_sites_are_those_of_the_processes_even_where_they_interleave():
    given = answers(run("mesh", processes=[0, 1, 2, 3], sites=["a", "b", "a", "b"]))
    for process, answer in enumerate(given):
        assert answer["sites"] == [[0, 0, 2, 2], [1, 1, 3, 3]]
        # Sum over a site's devices; and of the two devices at the same place of both sites.
        assert answer["in_site"] == (4.0 if process in (0, 2) else 8.0)
        assert set(answer["across_sites"]) == ({1.0} if process < 2 else {5.0})


def test_two_processes_of_four_devices_fill_a_topology():
    given = answers(run("mesh", "simulated-2x4", processes=[0, 1], devices=4))
    assert all(answer["sites"] == [[0] * 4, [1] * 4] for answer in given)


def test_a_topology_orders_the_sites_that_the_processes_name():
    sites = ["west", "east"]
    given = answers(run("mesh", "simulated-2x4", processes=[0, 1], devices=4, sites=sites))
    assert all(answer["sites"] == [[1] * 4, [0] * 4] for answer in given)


def test_two_sites_without_a_word_on_who_is_where_are_refused_everywhere():
    for code, _, errors in run("mesh", processes=[0, 1], devices=4):
        assert code == 2
        assert "set GEOJAX_SITE" in errors.splitlines()[-1]


def test_a_barrier_names_the_process_that_did_not_come():
    given = answers(run("barrier", processes=[0, 1, 2], devices=1, sites=["a", "b", "a"]))
    assert given[1] is None
    for answer in (given[0], given[2]):
        assert answer["missing"] == [1]
        assert "barrier 'early': process 1 (site b, host " in answer["message"]


def test_a_process_that_never_starts_is_named_in_one_line():
    outcomes = run("mesh", processes=[0, 2], count=3, GEOJAX_START_TIMEOUT_SECONDS="8s")
    assert [code for code, _, _ in outcomes] == [1, 1]
    for _, _, errors in outcomes:
        assert errors.splitlines() == [
            "1 of 3 processes did not start within 8 seconds: missing process 1"
        ]


def test_a_coordinator_that_never_comes_ends_in_one_line():
    started = time.monotonic()
    [(code, _, errors)] = run("mesh", processes=[1], count=2, GEOJAX_START_TIMEOUT_SECONDS="2s")
    assert code == 1
    assert "is process 0 running on this host, " in errors
    assert "process 1 could not reach the coordinator, process 0 at 127.0.0.1:" in errors
    assert len(errors.splitlines()) == 1
    assert time.monotonic() - started < 60


def test_the_watchdog_names_the_process_that_hangs():
    outcomes = run("watchdog", processes=[0, 1, 2], devices=1, sites=["a", "b", "a"])
    assert outcomes[0][0] == HANG
    reports = [errors for _, _, errors in outcomes if "did not reach step 3" in errors]
    assert len(reports) >= 1
    for errors in reports:
        assert "process 1 (site b, host " in errors
        assert "step 3 (training step) has taken" in errors
        assert "in barrier" in errors  # the stack that waits


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_one_process_ends_all_of_them_at_once_and_in_one_line(failing):
    started = time.monotonic()
    outcomes = run("failing", str(failing), processes=[0, 1, 2], devices=1)
    for process, (code, _, errors) in enumerate(outcomes):
        assert code == 2, errors
        last = [line for line in errors.splitlines() if "Gloo" not in line][-1]
        if process == failing:
            assert last == "my disk is empty"
        else:
            assert last.startswith(f"geojax: ending, because process {failing} (host ")
            assert last.endswith("ended: my disk is empty")
    assert time.monotonic() - started < 60


def test_who_was_killed_in_a_collective_is_named_by_all_others():
    outcomes = run("collective", processes=[0, 1, 2], sites=["a", "b", "c"], **TIMEOUT)
    assert outcomes[1][0] == -signal.SIGKILL
    lost = "lost contact with another process of the run"
    for code, _, errors in (outcomes[0], outcomes[2]):
        said = [line for line in errors.splitlines() if lost in line]
        assert code == 1, errors
        assert said, errors
        assert all(f"{lost}: process 1 (site b, host " in line for line in said), errors


def test_rubbish_is_ignored_and_a_forged_process_ends_the_job_in_one_line():
    """JAX's service asks nobody who he is: it can only be said why the job ended."""
    outcomes = run("strangers", processes=[0, 1], devices=1, sites=["a", "b"])
    for code, output, errors in outcomes:
        assert output == "all are well\n"
        assert code == 1, errors
        assert "stack trace" not in errors
    assert "a stranger connected to the coordinator's port under its number" in outcomes[0][2]
    assert "geojax: error: " in outcomes[1][2]


def test_a_process_that_joins_and_never_connects_to_jax_ends_the_job_in_one_line():
    [(code, _, errors)] = run("leaving", processes=[0], count=2, devices=1)
    assert code == 1, errors
    assert "Traceback" not in errors
    assert "did not connect all processes within 2 seconds, although all had joined" in errors


def test_a_process_that_stops_before_its_first_heartbeat_is_named():
    """Before the devices are known, for which the others wait."""
    started = time.monotonic()
    outcomes = run("joining", processes=[0, 1, 2], sites=["a", "b", "c"], stuck=[1], **TIMEOUT)
    for code, _, errors in (outcomes[0], outcomes[2]):
        assert code == 1, errors
        assert "lost contact with another process of the run: process 1 (site b, host " in errors
        assert "sent no heartbeat for 4 seconds; start all of them again" in errors
    assert time.monotonic() - started < 60
