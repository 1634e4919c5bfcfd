"""Runs that `geojax launch` starts: equal to one process, ended together, started again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.small_runs import (
    environment,
    finish,
    losses,
    train,
    wait_for,
    wait_for_step,
    write_config,
)

pytestmark = pytest.mark.multiprocess

STEPS = 20


def launch(config: Path, *options: str) -> subprocess.Popen:
    line = [sys.executable, "-m", "geojax", "launch", "--devices-per-process", "4", *options]
    return subprocess.Popen(
        [*line, "--", "train", str(config)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trainers(config: Path) -> dict[int, int]:
    """The processes that train `config`, by their number in the run; guards are left out."""
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


def checkpoints(run: Path) -> list[Path]:
    """Those that a reader would take; what is still being written has another name."""
    return [path for path in run.glob("checkpoints/*") if path.name.isdecimal()]


def test_a_killed_process_is_named_and_the_run_starts_again_as_one_process_would_go_on(
    tmp_path, corpus
):
    settings = {"checkpoint": {"every_steps": 5}, "evaluation": {"every_steps": 5, "rows": 240}}
    (tmp_path / "one").mkdir()
    alone = train(write_config(tmp_path / "one" / "run.yaml", corpus, **settings))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    (tmp_path / "two").mkdir()
    config = write_config(tmp_path / "two" / "run.yaml", corpus, **settings)
    run = tmp_path / "two" / "run"
    process = launch(config, "--sites", "2", "--restarts", "1")
    wait_for_step(run, 7, process)
    os.kill(trainers(config)[1], signal.SIGKILL)
    (printed,) = finish(process)
    assert process.returncode == 0, printed
    lines = printed.splitlines()
    assert "geojax launch: 2 process(es) in east, west" in lines
    assert any(
        line.startswith(
            "geojax launch: process 1 (site west) failed first, killed by SIGKILL, exit code 137"
        )
        for line in lines
    ), printed
    assert "geojax launch: restart 1 of 1, from the newest checkpoint" in lines
    assert any("resuming from step" in line for line in lines), printed
    assert any(line.startswith(f"east/0 | step {STEPS}/{STEPS}") for line in lines)
    expected, actual = losses(tmp_path / "one" / "run"), losses(run)
    assert sorted(actual) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(
        [actual[step] for step in sorted(actual)],
        [expected[step] for step in sorted(actual)],
        rtol=1e-5,
    )
    assert not trainers(config)


def test_when_the_coordinator_is_killed_all_end_and_no_checkpoint_is_half_written(tmp_path, corpus):
    evaluation = {"every_steps": 5000, "rows": 24}
    config = write_config(
        tmp_path / "run.yaml",
        corpus,
        steps=5000,
        evaluation=evaluation,
        checkpoint={"every_steps": 2},
    )
    run = tmp_path / "run"
    process = launch(config)
    wait_for(lambda: checkpoints(run), process)
    started = time.monotonic()
    os.kill(trainers(config)[0], signal.SIGKILL)
    (printed,) = finish(process)
    assert process.returncode == 137, printed
    assert "process 0 (site east) failed first, killed by SIGKILL, exit code 137" in printed
    assert "restart 1" not in printed
    assert time.monotonic() - started < 60
    assert not trainers(config)
    assert all((path / "manifest.json").exists() for path in checkpoints(run))


def test_bad_input_is_not_tried_again(tmp_path, corpus):
    config = write_config(tmp_path / "run.yaml", corpus, batch={"rows": 25, "sequence": 32})
    process = launch(config, "--restarts", "3")
    (printed,) = finish(process)
    assert process.returncode == 2, printed
    assert "batch.rows=25 does not divide over dc=2 x data=4" in printed
    assert "restart" not in printed
