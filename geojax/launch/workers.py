"""The processes of a run, as the launcher starts them: what each runs, where, and what it is told.

Each runs the same command and learns its place from variables (`geojax.runtime.cluster_env`).
"""

import dataclasses
import glob
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from geojax.errors import UserError
from geojax.launch import reaper
from geojax.runtime.cluster_env import VARIABLES
from geojax.wan import EmulatedWan


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of a run."""

    process: int
    """Its number, from 0."""
    site: str
    """The site that it belongs to."""
    command: tuple[str, ...]
    """What is started on this machine, the guard and what stands before it included."""
    environment: Mapping[str, str]
    """Variables that are set beside those of the launcher."""
    host: str | None = None
    """The host where it runs; None for this one."""

    @property
    def label(self) -> str:
        """What its output is marked with."""
        return f"{self.site}/{self.process}"

    def __str__(self) -> str:
        place = f"site {self.site}" + (f", host {self.host}" if self.host else "")
        return f"process {self.process} ({place})"


def local_members(
    sites: Sequence[str],
    processes_per_site: int,
    command: Sequence[str],
    *,
    simulated_devices: int | None,
    grace_seconds: float,
    wan: EmulatedWan | None = None,
) -> list[Member]:
    """The processes of a run on this machine, those of each site one after the other.

    Args:
        sites: the sites' names.
        processes_per_site: how many processes each site has.
        command: what each process runs.
        simulated_devices: how many CPU devices each simulates. None: the machine's GPUs, if it has
            any, are shared out evenly.
        grace_seconds: how long a process may live on after SIGTERM when the launcher is gone.
        wan: the emulated network in whose namespaces the sites run.

    Raises:
        UserError: the GPUs cannot be shared out evenly.
    """
    count = len(sites) * processes_per_site
    address = wan.site(sites[0]).address if wan else "127.0.0.1"
    coordinator = f"{address}:{_free_port()}"
    shares = _gpu_shares(count) if simulated_devices is None else []
    members = []
    for process in range(count):
        site = sites[process // processes_per_site]
        prefix = wan.site(site).command_prefix if wan else ()
        environment = place(process, count, coordinator, site, simulated_devices)
        if shares:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(shares[process])
        guarded = [sys.executable, "-I", reaper.__file__, f"{grace_seconds:g}", *command]
        members.append(Member(process, site, (*prefix, *guarded), environment))
    return members


def place(
    process: int, count: int, coordinator: str, site: str, simulated_devices: int | None
) -> dict[str, str]:
    """The variables that tell a process its place in the run."""
    fields = {
        "coordinator": coordinator,
        "process_count": count,
        "process_id": process,
        "site": site,
        "simulated_devices": simulated_devices,
    }
    told = {VARIABLES[name]: str(value) for name, value in fields.items() if value is not None}
    return told | {"PYTHONUNBUFFERED": "1"}  # a line is shown when it is written


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
        return port


def _gpu_shares(processes: int) -> list[list[str]]:
    """The GPUs that each process shall see; [] on a machine that has none for us."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        found = [path for path in glob.glob("/dev/nvidia*") if Path(path).name[6:].isdecimal()]
        gpus = [str(index) for index in range(len(found))]
    else:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    if not gpus:
        return []
    if len(gpus) % processes:
        raise UserError(
            f"{len(gpus)} GPU(s) do not divide among {processes} processes: choose another number "
            "of processes, or simulate devices with --devices-per-process"
        )
    each = len(gpus) // processes
    return [gpus[process * each :][:each] for process in range(processes)]
