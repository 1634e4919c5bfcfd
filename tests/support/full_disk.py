"""A small disk that is filled and emptied under one site of a run."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.island_jobs import start_sites
from support.small_runs import finish, losses, wait_for_step

FULL_AT, EMPTY_AT = 8, 40
"""Steps after which the disk is filled and emptied."""


class SmallDisk:
    """A file system in memory, with a file that takes what room is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 64) -> Iterator[SmallDisk | None]:
    """Mount a disk at `folder`; None where this user may not."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        yield None
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def train_with_a_full_disk(
    config: Path, folder: Path, disk: SmallDisk, *, full_at: int = FULL_AT, empty_at: int = EMPTY_AT
) -> dict[int, float]:
    """Train two islands, of which the first has no room between two steps; return the losses.

    Args:
        config: of `support.island_jobs`, with more than `empty_at` steps.
        folder: an empty one.
        disk: of the first site.
        full_at: step of the second site after which the disk is filled.
        empty_at: step after which it is emptied.
    """
    runs = (disk.folder / "run", folder / "other")
    sites = start_sites(config, runs=runs)
    try:
        wait_for_step(runs[1] / "west", full_at, sites[1])
        disk.fill()
        wait_for_step(runs[1] / "west", empty_at, sites[1])
        disk.empty()
        east, west = finish(*sites)
    finally:
        for site in sites:
            site.kill()
    assert [site.returncode for site in sites] == [0, 0], east + west
    assert "Traceback" not in east, east
    assert "No space left on device; writes lost so far: 1 of " in east, east
    text = (runs[0] / "east" / "metrics.jsonl").read_text()
    assert text.endswith("}\n")
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    found = losses(runs[1] / "west")
    assert steps == sorted(set(steps)), "each step stands in the file at most once"
    assert len(steps) < len(found), "some lines are lost"
    assert all(found[line["step"]] == line["loss"] for line in lines if "loss" in line)
    return found
