"""Runs of `geojax train` on sites that are jobs of their own."""

import secrets
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.ports import free_port
from support.small_runs import start

from geojax.launch.workers import worker_env

SITES = ("east", "west")
SETTINGS = {
    "steps": 6,
    "simulate_devices": 2,
    "mesh": {"dc": 2, "data": 2},
    "dc": {"join": "islands"},
    "batch": {"global_batch_size": 8, "sequence_length": 32, "microbatches": 2},
    "evaluation": {"interval": 3, "sequences": 8},
    "checkpoint": {"interval": 3},
    # The same at every step, however many there are.
    "optimizer": {"peak_learning_rate": 3e-3, "final_learning_rate": 3e-3, "warmup_steps": 0},
}

STAGES = {
    "steps": 20,
    "dc": {"join": "islands", "role": "stage"},
    "pipeline": {"schedule": "1f1b"},
    "evaluation": {"interval": 10, "sequences": 8},
    "checkpoint": {"interval": 10},
}


def site_variables(sites: Sequence[str] = SITES) -> list[dict[str, str]]:
    """The variables of each site: jobs of unrelated processes that share a key and addresses."""
    common = {
        "GEOJAX_ISLANDS": ",".join(sites),
        "GEOJAX_ISLANDS_COORDINATORS": ",".join(f"127.0.0.1:{free_port()}" for _ in sites),
        "GEOJAX_KEY": secrets.token_hex(16),
        "GEOJAX_ISLANDS_ADDRESS": "127.0.0.1",
        "GEOJAX_HEARTBEAT_TIMEOUT": "20",
    }
    return [{"GEOJAX_SITE": site} | common for site in sites]


def start_sites(
    config: Path,
    *arguments: str,
    runs: Sequence[Path] = (),
    sites: Sequence[str] = SITES,
    processes: Sequence[int] = (),
    devices: int | None = None,
    of_sites: Sequence[Mapping[str, str]] = (),
) -> list[subprocess.Popen]:
    """Start a job for each site, ordered by site: of one process, or of so many.

    `runs` are the sites' run directories where they share no file system, `devices` those of each
    site, and `of_sites` further variables of each.
    """
    counts = processes or [1] * len(sites)
    folders = [["--run_directory", str(run)] for run in runs] or [[]] * len(sites)
    started = []
    further = of_sites or [{}] * len(sites)
    for variables, folder, own, count in zip(
        site_variables(sites), folders, further, counts, strict=True
    ):
        meeting, each = f"127.0.0.1:{free_port()}", devices and devices // count
        for process in range(count):
            place = worker_env(process, count, meeting, variables["GEOJAX_SITE"], each)
            started.append(start(config, *arguments, *folder, **variables | place | own))
    return started
