import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from geojax.checkpoint import RunDirectory
from geojax.errors import UserError

# Locks the run directory; with "fork" it then ends and leaves a forked child behind.
HOLD = """
import os, sys, time
from pathlib import Path
from geojax.checkpoint import RunDirectory
RunDirectory(Path(sys.argv[1])).lock()
if "fork" in sys.argv and os.fork():
    os.kill(os.getpid(), 9)
os.write(1, b"locked by %d\\n" % os.getpid())
time.sleep(600)
"""


def hold(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLD, str(folder), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )


def test_paths_lie_below_the_directory(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "one")
    assert run.path.is_dir()
    for path in (run.config, run.checkpoints, run.metrics, run.tensorboard):
        assert path.parent == run.path


def test_the_config_is_written_whole(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    config = {"model": {"layers": 2, "name": "größe"}, "sizes": [1, 2.5, None, True]}
    run.write_config({"old": 1})
    run.write_config(config)
    assert yaml.safe_load(run.config.read_text(encoding="utf-8")) == config
    with pytest.raises(yaml.YAMLError):
        run.write_config({"model": object()})
    assert yaml.safe_load(run.config.read_text(encoding="utf-8")) == config


def test_a_second_lock_is_refused_until_the_first_is_released(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).lock(), pytest.raises(UserError, match=f"process {os.getpid()} on"):
        RunDirectory(tmp_path).lock()
    RunDirectory(tmp_path).lock().release()


def test_a_live_process_is_named_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == f"locked by {holder.pid}\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
            RunDirectory(tmp_path).lock()
    finally:
        holder.kill()
        holder.wait()
    RunDirectory(tmp_path).lock().release()


def test_a_forked_worker_that_outlives_the_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    holder = hold(tmp_path, "fork")
    assert holder.stdout is not None
    worker = int(holder.stdout.readline().removeprefix("locked by "))
    try:
        assert holder.wait() == -9
        os.kill(worker, 0)  # it lives
        RunDirectory(tmp_path).lock().release()
    finally:
        os.kill(worker, 9)


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(UserError, match="cannot be a run directory"):
        RunDirectory(path)


@pytest.mark.parametrize("name", ["lock", "config.yaml", "metrics.jsonl", "loss.png", "sample.txt"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_artefacts_of_another_kind_are_refused(tmp_path: Path, name: str, make: Any) -> None:
    make(tmp_path / name)
    with pytest.raises(UserError, match=f"{name}: is .*; move it away") as refusal:
        RunDirectory(tmp_path).lock()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_never_follows_a_link(tmp_path: Path, link: Any) -> None:
    victim = tmp_path / "victim"
    victim.write_text("of somebody else")
    (tmp_path / "run").mkdir()
    link(victim, tmp_path / "run" / "lock")
    with pytest.raises(UserError, match=r"lock: is a link, .*; move it away"):
        RunDirectory(tmp_path / "run").lock()
    assert victim.read_text() == "of somebody else"


def test_a_lock_that_holds_no_text_is_reported_too(tmp_path: Path) -> None:
    with RunDirectory(tmp_path).lock():
        (tmp_path / "lock").write_bytes(b"\xff\xfe \x80")
        with pytest.raises(UserError, match="is in use by ") as refusal:
            RunDirectory(tmp_path).lock()
    assert "\n" not in str(refusal.value)


def test_a_folder_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(path: Path, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(UserError, match=r"cannot be a run directory \(Permission denied\)"):
        RunDirectory.is_there(tmp_path / "run")


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"{name}: is no folder"):
        RunDirectory(tmp_path).lock()


def test_a_directory_removed_under_a_run_is_made_and_locked_again(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run").lock() as run:
        assert not run.make_again_if_removed()
        shutil.rmtree(run.path)
        assert run.make_again_if_removed()
        with pytest.raises(UserError, match="is in use"):
            RunDirectory(run.path).lock()
        assert not run.make_again_if_removed()
