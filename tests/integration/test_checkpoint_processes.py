"""Checkpoints written and read by real processes: several at once, and one that is killed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ports import free_port
from support.xla_flags import MAX_ISA

WORKER = Path(__file__).parent / "checkpoint_worker.py"
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": MAX_ISA}


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(action: str, folder: Path, dc: int, data: int, processes: int) -> list[str]:
    """The output of every process."""
    if processes == 1:
        workers = [start(action, folder, dc, data)]
    else:
        coordinator = f"127.0.0.1:{free_port()}"
        workers = [
            start(action, folder, dc, data, coordinator, processes, process)
            for process in range(processes)
        ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert all(worker.returncode == 0 for worker in workers), "\n".join(outputs)
    return outputs


def test_two_processes_save_and_any_number_restores(tmp_path: Path) -> None:
    for output in run("save", tmp_path, 2, 4, processes=2):
        assert "SAVED" in output
    for dc, data, processes in [(2, 4, 2), (2, 4, 1), (1, 3, 1)]:
        for output in run("restore", tmp_path, dc, data, processes):
            assert "RESTORED 20" in output


def test_one_process_saves_and_two_restore(tmp_path: Path) -> None:
    run("save", tmp_path, 3, 2, processes=1)
    for output in run("restore", tmp_path, 2, 4, processes=2):
        assert "RESTORED 20" in output


def test_two_processes_fall_back_together(tmp_path: Path) -> None:
    run("save", tmp_path, 2, 4, processes=2)
    damaged = max((tmp_path / "20" / "ocdbt.process_1" / "d").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0\0")
    outputs = run("restore", tmp_path, 2, 4, processes=2)
    assert all("RESTORED 10" in output for output in outputs)
    assert sum("REPORT" in output for output in outputs) == 1


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    for output in run("save-privately", tmp_path, 2, 4, processes=2):
        assert "REFUSED" in output
        assert "process 1 does not see what process 0 writes there" in output


def test_sites_save_and_restore_without_a_common_file_system(tmp_path: Path) -> None:
    for output in run("sites-save", tmp_path, 2, 4, processes=2):
        assert "SAVED" in output
    for site in range(2):
        (only,) = (tmp_path / f"file_system_{site}").iterdir()
        assert only.name == f"site{site}"
        assert (only / "20" / "manifest.json").exists()
    for output in run("sites-restore", tmp_path, 2, 4, processes=2):
        assert "RESTORED 20" in output
        assert "REPORT" not in output
    # What one site has not saved, none restores.
    (tmp_path / "file_system_1" / "site1" / "20" / "manifest.json").unlink()
    for output in run("sites-restore", tmp_path, 2, 4, processes=2):
        assert "RESTORED 10" in output


def test_sites_send_each_other_what_another_layout_lacks(tmp_path: Path) -> None:
    """Each site finds the other's folder, and lacks its own half of the moments."""
    run("sites-save", tmp_path, 2, 4, processes=2)
    first, second = (tmp_path / f"file_system_{site}" for site in range(2))
    (second / "site1").rename(tmp_path / "site1")
    (first / "site0").rename(second / "site0")
    (tmp_path / "site1").rename(first / "site1")
    outputs = run("sites-restore", tmp_path, 2, 4, processes=2)
    for output in outputs:
        assert "RESTORED 20" in output
    # Half of the moments, 5 x 12 float32, go each way.
    assert "restoring onto another layout: a site gets 240 B over the link" in outputs[0]


@pytest.mark.parametrize(
    "action",
    [
        "save-without-space",
        "sites-save-without-space",
        "save-without-folder",
        "save-without-commit",
        "sites-save-without-commit",
    ],
)
def test_a_process_that_cannot_write_keeps_nobody_waiting(tmp_path: Path, action: str) -> None:
    first, second = run(action, tmp_path, 2, 4, processes=2)
    assert "SAVED" in first
    assert "SAVED" in second
    (line,) = (line for line in first.splitlines() if "warning" in line)
    assert "step 10 could not be saved" in line
    kept = {path.parent.name for path in tmp_path.rglob("manifest.json")}
    assert kept == {"20"}, "what the other site saved is removed"


def test_killed_before_the_commit_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    worker = start("save-halfway", tmp_path, 2, 4)
    assert worker.stdout is not None
    assert any("HALFWAY" in line for line in worker.stdout)
    worker.kill()
    worker.wait()
    assert (tmp_path / "20.orbax-checkpoint-tmp").is_dir()

    (output,) = run("restore", tmp_path, 1, 3, processes=1)
    assert "RESTORED 10" in output
    assert "step 20 is not whole (its save was interrupted); restoring step 10" in output
    assert (tmp_path / "20.orbax-checkpoint-tmp").is_dir()


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    tmp_path: Path, delay: float
) -> None:
    worker = start("save", tmp_path, 2, 4)
    while not (tmp_path / "10").is_dir():
        assert worker.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    worker.kill()
    worker.communicate()
    (output,) = run("restore", tmp_path, 2, 4, processes=1)
    assert "RESTORED" in output
