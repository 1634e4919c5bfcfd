"""Index, site and coordinator of this process, from arguments, environment, SLURM or Kubernetes.

| setting           | argument, else variable | else SLURM           | else Kubernetes      |
|-------------------|-------------------------|----------------------|----------------------|
| coordinator       | GEOJAX_COORDINATOR      | first host of step   | pod 0 of the job     |
| bind_address      | GEOJAX_BIND_ADDRESS     |                      |                      |
| process_count     | GEOJAX_PROCESS_COUNT    | SLURM_STEP_NUM_TASKS |                      |
| process_id        | GEOJAX_PROCESS_ID       | SLURM_PROCID         | JOB_COMPLETION_INDEX |
| site              | GEOJAX_SITE             |                      |                      |
| simulated_devices | GEOJAX_SIMULATE_DEVICES |                      |                      |
| key               | GEOJAX_KEY              |                      |                      |

Where each site has its own scheduler, each scheduler numbers its processes from 0.
GEOJAX_PROCESS_OFFSET, the number of processes in the sites before this one, is then added to the
scheduler's index. GEOJAX_COORDINATOR and GEOJAX_PROCESS_COUNT must be given explicitly.
"""

import re
import socket
from collections.abc import Callable, Mapping
from typing import Annotated

import pydantic

from geojax.errors import UserError
from geojax.network_names import Host, HostAndPort, HostPort, SiteName
from geojax.quantities import Seconds, SimulatedDevices
from geojax.settings import Settings, validate

# Kubernetes pods have ports of their own; SLURM jobs on one host need different ones.
FIRST_PORT = 61440
_SLURM_PORTS = 4096


def _as_key(text: str) -> str:
    # A message of pydantic's would show the key.
    if not re.fullmatch(r"[!-~]{16,64}", text):
        raise ValueError(
            f"has {len(text)} characters; a key has 16 to 64 ASCII letters, digits and signs, and "
            "no blanks (openssl rand -hex 16)"
        )
    return text


Key = Annotated[str, pydantic.BeforeValidator(_as_key)]
"""Secret that all processes of a run share."""


class ProcessSettings(Settings):
    """This process's part of a job; None: from the environment, else a job of one process."""

    coordinator: HostAndPort | None = None
    """host:port of process 0, as the other processes reach it."""
    bind_address: Host | None = None
    """Address that process 0 listens on; None: the coordinator's. It differs where the
    coordinator's address is translated on the way to process 0; 0.0.0.0 stands for all."""
    process_count: int | None = pydantic.Field(default=None, ge=1, le=1 << 20)
    """Number of processes of the job, in all sites."""
    process_id: int | None = pydantic.Field(default=None, ge=0, lt=1 << 20)
    """Index of this process, from 0."""
    process_offset: int = pydantic.Field(default=0, ge=0, le=1 << 20)
    """Number added to the index that SLURM or Kubernetes gives; never to `process_id`."""
    site: SiteName | None = None
    """Name of the site where this process runs."""
    simulated_devices: SimulatedDevices | None = None
    """Number of CPU devices to simulate in this process, instead of its accelerators."""
    start_timeout_seconds: Seconds = pydantic.Field(default=300.0, ge=0.1, le=604_800)
    """Time to wait at start-up for the other processes."""
    heartbeat_timeout_seconds: Seconds = pydantic.Field(default=40.0, ge=1, le=86_400)
    """Time without a heartbeat of some process after which the run ends."""
    key: Key | None = pydantic.Field(default=None, repr=False)
    """Secret that all processes of the run share; None: any program that reaches the coordinator's
    port may take part in the start."""


VARIABLES = {
    "coordinator": "GEOJAX_COORDINATOR",
    "bind_address": "GEOJAX_BIND_ADDRESS",
    "process_count": "GEOJAX_PROCESS_COUNT",
    "process_id": "GEOJAX_PROCESS_ID",
    "process_offset": "GEOJAX_PROCESS_OFFSET",
    "site": "GEOJAX_SITE",
    "simulated_devices": "GEOJAX_SIMULATE_DEVICES",
    "start_timeout_seconds": "GEOJAX_START_TIMEOUT_SECONDS",
    "heartbeat_timeout_seconds": "GEOJAX_HEARTBEAT_TIMEOUT",
    "key": "GEOJAX_KEY",
}
"""Environment variable of each setting."""

KEY_VARIABLE = VARIABLES["key"]


def complete(
    settings: ProcessSettings,
    environment: Mapping[str, str],
    host_name: Callable[[], str] = socket.getfqdn,
) -> ProcessSettings:
    """Fill what `settings` leaves open from `environment`, as in the module's table.

    The result has `process_count`; with more than one process also `coordinator` and `process_id`.

    Raises:
        UserError: a variable holds something impossible, or a part of what several processes need
            is missing; the message names the variable to set.
    """
    found = {
        field: environment[variable]
        for field, variable in VARIABLES.items()
        if environment.get(variable)
    }
    found |= settings.model_dump(exclude_unset=True, exclude_none=True)
    merged = validate(ProcessSettings, found, "GEOJAX_* variables")
    if merged.process_count == 1:
        return _checked(merged)
    explicit_id = merged.process_id
    scheduled = _slurm(environment) or _kubernetes(environment, host_name)
    if "process_id" in scheduled:
        scheduled["process_id"] = int(scheduled["process_id"]) + merged.process_offset
    merged = validate(
        ProcessSettings,
        scheduled | merged.model_dump(exclude_none=True),
        "the scheduler's variables",
    )
    # Pods of an indexed Job that names no number of processes are runs of their own.
    if merged.process_count is None and (explicit_id is not None or merged.coordinator is not None):
        known = f"the coordinator is {merged.coordinator}"
        if merged.process_id is not None:
            known = f"this is process {merged.process_id} of a job"
        raise UserError(
            f"{known}, but of how many processes is not known: set GEOJAX_PROCESS_COUNT"
            + (" and GEOJAX_PROCESS_ID" if merged.process_id is None else "")
        )
    return _checked(merged)


def _checked(settings: ProcessSettings) -> ProcessSettings:
    count = settings.process_count or 1
    for field in ("coordinator", "process_id") if count > 1 else ():
        if getattr(settings, field) is None:
            raise UserError(
                f"the job has {count} processes, but its {field} is not known: set "
                f"{VARIABLES[field]}"
            )
    if settings.process_id is not None and settings.process_id >= count:
        processes = "one process" if count == 1 else f"{count} processes"
        raise UserError(
            f"process_id={settings.process_id}, but the job has {processes}, numbered from 0"
        )
    return settings.model_copy(update={"process_count": count})


def _slurm(environment: Mapping[str, str]) -> dict[str, str | int]:
    """Read the variables of a SLURM job step; {} in a batch script, or with a single task."""
    try:
        count = int(environment["SLURM_STEP_NUM_TASKS"])
        process_id = int(environment["SLURM_PROCID"])
        job, hosts = int(environment["SLURM_JOB_ID"]), environment["SLURM_STEP_NODELIST"]
    except (KeyError, ValueError):
        return {}
    if count == 1 and not environment.get("GEOJAX_PROCESS_COUNT"):
        return {}
    port = FIRST_PORT + job % _SLURM_PORTS
    return {
        "coordinator": str(HostPort(first_host(hosts), port)),
        "process_count": count,
        "process_id": process_id,
    }


def first_host(hosts: str) -> str:
    """Return the first host of a SLURM node list: n[001-004,7],m1 gives n001."""
    head, bracket, tail = hosts.partition("[")
    if not bracket or "," in head:
        return hosts.split(",")[0]
    number = tail.split("]")[0].split(",")[0].split("-")[0]
    suffix = tail.partition("]")[2].split(",")[0]
    return f"{head}{number}{suffix}"


def _kubernetes(
    environment: Mapping[str, str], host_name: Callable[[], str]
) -> dict[str, str | int]:
    """Read the variables of a pod of an indexed Job (alone or in a JobSet); {} elsewhere.

    The pod's host name is <job>-<index> with the subdomain of the Job's headless service, so that
    pod 0 is found by its name. The number of pods is nowhere in a pod's environment.
    """
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if "KUBERNETES_SERVICE_HOST" not in environment or not index.isdecimal():
        return {}
    pod, _, domain = host_name().partition(".")
    found: dict[str, str | int] = {"process_id": int(index)}
    if pod.endswith(f"-{index}"):
        first = f"{pod.removesuffix(index)}0"
        name = ".".join(part for part in (first, domain) if part)
        found["coordinator"] = str(HostPort(name, FIRST_PORT))
    return found
