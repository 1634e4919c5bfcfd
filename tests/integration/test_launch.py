"""Runs that `geojax launch` starts: equal to one process, ended together, started again.

Everything happens on loopback, which anybody may use, and what needs a link also over an emulated
one, where the tests run as root.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.emulated_link import skip_unless_possible
from support.small_runs import (
    assert_as_near,
    checkpoint_folders,
    environment,
    finish,
    losses,
    train,
    wait_for,
    wait_for_step,
    write_config,
)

from geojax.wan import EmulatedWan, WanSettings, bring_up, cut, restore, take_down

STEPS = 40
HEARTBEAT_TIMEOUT = 8
SETTINGS = {
    "steps": STEPS,
    "simulate_devices": 1,
    "mesh": {},
    "batch": {"global_batch_size": 8, "sequence_length": 32, "microbatches": 2},
    # The same at every step, however many there are.
    "optimizer": {"peak_learning_rate": 3e-3, "final_learning_rate": 3e-3, "warmup_steps": 0},
}
ROLES = {
    "data": {"mesh": {"dc": 2}},
    "stage": {"mesh": {"dc": 2}, "dc": {"role": "stage"}, "pipeline": {"hop_ticks": 2}},
}


def launch(config: Path, *options: str) -> subprocess.Popen:
    line = [sys.executable, "-m", "geojax", "launch", "--devices-per-process", "1", *options]
    return subprocess.Popen(
        [*line, "--", "train", str(config)],
        env=environment(GEOJAX_HEARTBEAT_TIMEOUT=str(HEARTBEAT_TIMEOUT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trainers(config: Path) -> dict[int, int]:
    """The processes that train `config`, by their number in the run; reapers are left out."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[1:5] == [b"-m", b"geojax", b"train", str(config).encode()]:
                variables = (folder / "environ").read_bytes()
                found[int(re.search(rb"GEOJAX_PROCESS_ID=(\d+)", variables)[1])] = int(folder.name)
        except (OSError, TypeError):
            continue
    return found


def nothing_is_half_done(config: Path, printed: str) -> None:
    """No process is left, no checkpoint is half written, and nobody ended in a stack trace."""
    assert not trainers(config)
    saved = checkpoint_folders(config.parent / "run")
    assert saved
    assert all((path / "manifest.json").exists() for path in saved)
    for words in ("Traceback", "stack trace", "terminate called"):
        assert words not in printed, printed


def newest_checkpoint(run: Path) -> int:
    """The step of the newest whole checkpoint; 0: there is none."""
    folders = checkpoint_folders(run)
    sites = {folder.parent for folder in folders}
    whole = {folder for folder in folders if (folder / "manifest.json").exists()}
    steps = {int(folder.name) for folder in whole}
    return max(
        (step for step in steps if all(site / str(step) in whole for site in sites)), default=0
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory, corpus):
    """The losses of one process with one device."""
    folder = tmp_path_factory.mktemp("alone")
    result = train(write_config(folder / "run.yaml", corpus, **SETTINGS))
    assert result.returncode == 0, result.stdout + result.stderr
    return losses(folder / "run")


@pytest.fixture(scope="module")
def wan():
    """Two sites at the ends of an emulated link."""
    name = f"launch-{os.getpid()}"
    skip_unless_possible(name)
    yield bring_up(WanSettings(round_trip_seconds=0.005), name)
    take_down(name)


def over(wan: EmulatedWan) -> tuple[str, ...]:
    return ("--wan", "--wan-name", wan.name)


# The role of data over loopback is that of the run with faults below.
@pytest.mark.parametrize(
    ("network", "role"),
    [
        ("loopback", "stage"),
        pytest.param("emulated link", "data", marks=pytest.mark.measures),
        pytest.param("emulated link", "stage", marks=pytest.mark.measures),
    ],
)
def test_two_sites_train_as_one_process_does(
    tmp_path, corpus, alone, exact_losses, request, network, role
):
    options = over(request.getfixturevalue("wan")) if network == "emulated link" else ()
    settings = SETTINGS | ROLES[role] | {"steps": 10}
    config = write_config(tmp_path / "run.yaml", corpus, **settings)
    process = launch(config, *options)
    (printed,) = finish(process)
    assert process.returncode == 0, printed
    assert "geojax launch: 2 process(es) in east, west" in printed
    assert "east/0 | step 10/10" in printed
    assert "west/1 | step" not in printed, "only the first process reports"
    made = losses(tmp_path / "run")
    assert sorted(made) == list(range(1, 11))
    assert_as_near(made, alone, exact_losses)


def test_whatever_fails_the_run_goes_on_as_one_process_would(tmp_path, corpus, alone, exact_losses):
    """A process is killed, then the one that coordinates the others, then one gets stuck."""
    # Validating at every step leaves time for the faults.
    slow = {"checkpoint": {"interval": 5}, "evaluation": {"interval": 1, "sequences": 240}}
    config = write_config(tmp_path / "run.yaml", corpus, **SETTINGS | ROLES["data"] | slow)
    run = tmp_path / "run"
    process = launch(config, "--restarts", "3", "--grace-seconds", "1s")
    faults = ((5, 1, signal.SIGKILL), (15, 0, signal.SIGKILL), (25, 1, signal.SIGSTOP))
    for saved, number, fault in faults:
        wait_for(lambda saved=saved: newest_checkpoint(run) >= saved, process)
        os.kill(trainers(config)[number], fault)
    (printed,) = finish(process)
    assert process.returncode == 0, printed
    verdicts = [line for line in printed.splitlines() if line.endswith("last lines:")]
    assert [line.removeprefix("geojax launch: ") for line in verdicts] == [
        "process 1 (site west) failed first, killed by SIGKILL, exit code 137; its last lines:",
        "process 0 (site east) failed first, killed by SIGKILL, exit code 137; its last lines:",
        "process 1 (site west) was stuck, and killed when the others had given up, exit code 1; "
        "its last lines:",
    ]
    said = r"\| (?:geojax: )?error: lost contact with another process of the run: process"
    assert len(re.findall(rf"^east/0 {said} 1 \(site west, host ", printed, re.MULTILINE)) == 2
    assert len(re.findall(rf"^west/1 {said} 0 \(site east, host ", printed, re.MULTILINE)) == 1
    assert f"sent no heartbeat for {HEARTBEAT_TIMEOUT} seconds" in printed
    assert "geojax launch: restart 3 of 3, from the newest checkpoint" in printed
    resumed = [int(step) for step in re.findall(r"east/0 \| resuming from step (\d+)", printed)]
    assert len(resumed) == len(faults)
    assert all(step >= saved for step, (saved, *_) in zip(resumed, faults, strict=True))
    nothing_is_half_done(config, printed)
    made = losses(run)
    assert sorted(made) == list(range(1, STEPS + 1))
    assert_as_near(made, alone, exact_losses)


@pytest.mark.measures
def test_sites_whose_link_is_cut_both_say_so_and_go_on_when_it_is_restored(tmp_path, corpus, wan):
    endless = {
        "steps": 100_000,
        "evaluation": {"interval": 100_000, "sequences": 8},
        "checkpoint": {"interval": 20},
    }
    config = write_config(tmp_path / "run.yaml", corpus, **SETTINGS | ROLES["data"] | endless)
    run = tmp_path / "run"
    process = launch(config, *over(wan), "--restarts", "1")
    wait_for_step(run, 25, process)
    running = set(trainers(config).values())
    (link,) = wan.links
    cut(wan, link)
    wait_for(lambda: not running & set(trainers(config).values()), process)
    reached = max(losses(run))
    restore(wan, link)
    wait_for_step(run, reached + 25, process)
    process.send_signal(signal.SIGINT)
    (printed,) = finish(process)
    assert process.returncode == 130, printed
    lost = "geojax: error: lost contact with another process of the run: process"
    for words in (
        rf"^east/0 \| {lost} 1 \(site west, host .*\) sent no heartbeat for",
        rf"^west/1 \| {lost} 0 \(site east, host .*\), which coordinates the run, did not answer",
        "^geojax launch: the sites east and west lost contact with each other, exit code 1;",
        r"^east/0 \| resuming from step \d*[02468]0 in",
        r"^east/0 \| stopped at step",
    ):
        assert re.search(words, printed, re.MULTILINE), printed
    nothing_is_half_done(config, printed)


def test_bad_input_is_not_tried_again(tmp_path, corpus):
    settings = (
        SETTINGS | ROLES["data"] | {"batch": {"global_batch_size": 25, "sequence_length": 32}}
    )
    config = write_config(tmp_path / "run.yaml", corpus, **settings)
    process = launch(config, "--restarts", "3")
    (printed,) = finish(process)
    assert process.returncode == 2, printed
    assert "batch.global_batch_size=25 does not divide over dc=2" in printed
    assert "restart" not in printed
