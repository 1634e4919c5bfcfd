"""Workers: the processes of a run as the launcher starts them, with command, host and variables.

All run the same command, and each learns its index and site from variables
(`geojax.job.cluster_env`).
"""

import dataclasses
import glob
import itertools
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from geojax.errors import UserError
from geojax.job.cluster_env import KEY_VARIABLE, VARIABLES
from geojax.job.island_env import first_port_of, island_env
from geojax.launch import reaper
from geojax.wan import EmulatedWan

_FIRST_PORT, _PORTS = 22_000, 10_000
_numbers = itertools.count(secrets.randbelow(_PORTS))


@dataclasses.dataclass(frozen=True)
class Worker:
    """One process of a run."""

    process: int
    """Index in the run, from 0."""
    site: str
    """Name of the site that the process belongs to."""
    command: tuple[str, ...]
    """Command that is started on this machine, including the reaper and any prefix before it."""
    environment: Mapping[str, str]
    """Variables that are set in addition to those of the launcher."""
    host: str | None = None
    """Host where the process runs; None for this one."""
    secret: str | None = None
    """First line of the command's standard input, before those for its reaper."""

    @property
    def label(self) -> str:
        """Mark in front of each line of output: site/index."""
        return f"{self.site}/{self.process}"

    def __str__(self) -> str:
        where = f"site {self.site}" + (f", host {self.host}" if self.host else "")
        return f"process {self.process} ({where})"


def local_workers(
    sites: Sequence[str],
    processes: Sequence[int],
    command: Sequence[str],
    *,
    simulated_devices: int | None,
    grace_seconds: float,
    wan: EmulatedWan | None = None,
) -> list[Worker]:
    """Make the workers of a run on this machine, ordered by site.

    Args:
        sites: names of the sites.
        processes: number of workers in each site.
        command: the command that each worker runs.
        simulated_devices: number of CPU devices that each simulates in the site with most workers;
            all sites have equally many. None: the machine's GPUs, if it has any, are shared out
            evenly.
        grace_seconds: time that a worker has between SIGTERM and SIGKILL if the launcher dies.
        wan: the emulated network in whose namespaces the sites run.

    Raises:
        UserError: the GPUs, or the devices of a site, cannot be shared out evenly.
    """
    address = wan.site(sites[0]).address if wan else "127.0.0.1"
    coordinator, key = f"{address}:{_free_port()}", new_key()
    of_workers = [site for site, count in zip(sites, processes, strict=True) for _ in range(count)]
    shares = _gpu_shares(processes) if simulated_devices is None else []
    workers = []
    for process, site in enumerate(of_workers):
        prefix = wan.site(site).command_prefix if wan else ()
        devices = simulated_devices
        if devices is not None:
            of_site, count = devices * max(processes), of_workers.count(site)
            if of_site % count:
                raise UserError(
                    f"{of_site} devices of a site do not divide among the {count} processes of "
                    f"{site}: choose other numbers"
                )
            devices = of_site // count
        environment = worker_env(process, len(of_workers), coordinator, site, devices)
        environment[KEY_VARIABLE] = key
        if shares:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(shares[process])
        reaped = [sys.executable, "-I", reaper.__file__, f"{grace_seconds:g}", *command]
        workers.append(Worker(process, site, (*prefix, *reaped), environment))
    return workers


def as_islands(workers: Sequence[Worker], wan: EmulatedWan | None = None) -> list[Worker]:
    """Make each site of `local_workers` a job of its own.

    Args:
        workers: of all sites, ordered by site.
        wan: the emulated network in whose namespaces the sites run.
    """
    sites = tuple(dict.fromkeys(worker.site for worker in workers))
    of_workers = [worker.site for worker in workers]
    addresses = {site: wan.site(site).address if wan else "127.0.0.1" for site in sites}
    coordinators = {site: f"{addresses[site]}:{_free_port()}" for site in sites}
    meetings = [f"{addresses[site]}:{_free_port()}" for site in sites]

    def of_own_job(worker: Worker) -> Worker:
        site, first = worker.site, of_workers.index(worker.site)
        port = first_port_of(os.environ, 0 if wan else first)
        place = worker.process - first, of_workers.count(site)
        environment = worker_env(*place, coordinators[site], site, None)
        environment |= island_env(sites, meetings, addresses[site], port)
        return dataclasses.replace(worker, environment={**worker.environment, **environment})

    return list(map(of_own_job, workers))


def worker_env(
    process: int, count: int, coordinator: str, site: str, simulated_devices: int | None
) -> dict[str, str]:
    """Return the variables that tell a worker its index, site and coordinator."""
    fields = {
        "coordinator": coordinator,
        "process_count": count,
        "process_id": process,
        "site": site,
        "simulated_devices": simulated_devices,
    }
    variables = {VARIABLES[name]: str(value) for name, value in fields.items() if value is not None}
    return variables | {"PYTHONUNBUFFERED": "1"}  # a line is shown when it is written


def new_key() -> str:
    """Return a secret for the processes of one run."""
    return secrets.token_hex(16)


def _free_port() -> int:
    """Return a port that nobody uses, each time another.

    It is below those that Linux deals out to connections: one of these could take it before the
    process that is to listen there has started, or starts again.
    """
    for number in itertools.islice(_numbers, _PORTS):
        port = _FIRST_PORT + number % _PORTS
        with socket.socket() as candidate:
            try:
                candidate.bind(("", port))
            except OSError:
                continue
        return port
    raise UserError(
        f"all ports from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1} of this host are taken"
    )


def _gpu_shares(processes: Sequence[int]) -> list[list[str]]:
    """Return the GPUs for each worker to see, as many in each site; [] where JAX has none."""
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
    of_site, rest = divmod(len(gpus), len(processes))
    if rest or any(of_site % count for count in processes):
        raise UserError(
            f"{len(gpus)} GPU(s) do not divide among {sum(processes)} processes: choose another "
            "number of processes, or simulate devices with --devices-per-process"
        )
    each = [of_site // count for count in processes for _ in range(count)]
    ends = itertools.accumulate(each)
    return [gpus[end - count : end] for end, count in zip(ends, each, strict=True)]
