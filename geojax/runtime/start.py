"""Start and end of a process: devices, XLA flags, JAX's distributed runtime, sites."""

import ipaddress
import math
import os
import socket
import sys

import jax

from geojax.errors import RunError, UserError
from geojax.job.cluster_env import KEY_VARIABLE, ProcessSettings, complete
from geojax.job.exit_messages import register_process_names
from geojax.mesh import register_processes
from geojax.network_names import HostPort
from geojax.runtime.barrier import barrier
from geojax.runtime.device_memory import take_memory_fraction
from geojax.runtime.devices import simulate_devices
from geojax.runtime.jax_private import backend_runs, coordination_client
from geojax.runtime.key_value_store import sign_with
from geojax.runtime.liveness.peer_monitor import (
    reporting_service_errors,
    start_peer_monitor,
    stop_peer_monitor,
)
from geojax.runtime.platform import platform_named
from geojax.runtime.rendezvous import Presence, join
from geojax.runtime.variables import check_environment
from geojax.runtime.xla_flags import apply_xla_flags, expected_platform
from geojax.topology import Process

# How long JAX waits at the exit for all processes to get there: they have met at a barrier before,
# or one has aborted the job.
_SHUTDOWN_SECONDS = 30
# From the moment when all processes are known to be there.
_CONNECT_SECONDS = 120
_END_SECONDS = 600.0
# How long geojax takes at most to end a run in which a process is silent. After that JAX ends it,
# with a stack trace.
_ENDING_SECONDS = 30


def start(settings: ProcessSettings | None = None) -> tuple[Process, ...]:
    """Start this process's part of the job, before the first JAX operation.

    Settings that are left open come from GEOJAX_* variables, SLURM or Kubernetes (see
    `geojax.job.cluster_env`). Afterwards `jax.devices()` are the devices of all
    processes and `make_mesh` knows the sites.

    Returns:
        all processes of the job, by their index.

    Raises:
        MissingProcessesError: some process did not start in time; it is named.
        RunError: some process ended before all were connected.
        UserError: settings are missing or wrong, processes do not fit together, JAX already runs.
    """
    check_environment(os.environ)
    settings = complete(settings or ProcessSettings(), os.environ)
    count, process_id = settings.process_count, settings.process_id
    assert count is not None, "complete() must fill in the number of processes"
    if count > 1 and (backend_runs() or coordination_client() is not None):
        raise UserError(
            "JAX already runs in this process: call geojax.runtime.start once, before the first "
            "JAX operation"
        )
    if settings.simulated_devices is not None:
        simulate_devices(settings.simulated_devices)
    if not backend_runs():
        apply_xla_flags(expected_platform())
        take_memory_fraction(expected_platform())
    if count == 1:
        register_process_names([settings.site], [socket.gethostname()])
        return _register([settings.site], [socket.gethostname()])

    assert process_id is not None, "complete() must give every process of several an index"
    assert settings.coordinator is not None, "complete() must fill in the coordinator"
    if settings.key is None and process_id == 0:
        print(
            f"no key: any program that reaches {settings.coordinator} can take part in the start; "
            f"a secret in {KEY_VARIABLE}, the same in all processes, keeps others out",
            file=sys.stderr,
            flush=True,
        )
    everyone, key, _ = join(
        process_id,
        count,
        settings.coordinator,
        settings.site,
        settings.start_timeout_seconds,
        settings.bind_address,
        key=(settings.key or "").encode(),
    )
    sign_with(key)
    if platform_named(expected_platform()).gloo:
        _check_addresses(everyone)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # geojax agrees on a stop in the step; JAX's own service for that would take over SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    _connect(settings.coordinator, settings, process_id, everyone)
    sites = [presence.site for presence in everyone]
    hosts = [presence.host for presence in everyone]
    register_process_names(sites, hosts)
    # Before the devices are known, for which processes wait for each other.
    start_peer_monitor(settings.heartbeat_timeout_seconds)
    return _register(sites, hosts)


def finish(timeout_seconds: float = _END_SECONDS) -> None:
    """End the job together: wait for the other processes, then leave JAX's distributed runtime.

    Raises:
        MissingProcessesError: some process did not arrive within `timeout_seconds`.
    """
    barrier("end of the job", timeout_seconds)
    stop_peer_monitor()
    jax.distributed.shutdown()


def _jax_heartbeat_timeout(timeout_seconds: float) -> int:
    """Return a timeout for JAX's own heartbeat that ends after geojax has ended the run.

    JAX sends its heartbeat once in half of its timeout, so that half of it may be over at any time.
    """
    return math.ceil(2 * (timeout_seconds + _ENDING_SECONDS))


def _connect(
    coordinator: str, settings: ProcessSettings, process_id: int, everyone: list[Presence]
) -> None:
    """Connect this process to JAX's coordination service, as all that have joined do now.

    Raises:
        RunError: some process did not connect.
    """
    try:
        with reporting_service_errors(coordinator, process_id):
            jax.distributed.initialize(
                coordinator,
                len(everyone),
                process_id,
                local_device_ids=_own_devices(process_id, everyone),
                initialization_timeout=_CONNECT_SECONDS,
                heartbeat_timeout_seconds=_jax_heartbeat_timeout(
                    settings.heartbeat_timeout_seconds
                ),
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
                cluster_detection_method="deactivate",
                coordinator_bind_address=_bind_address(coordinator, settings.bind_address),
            )
    except RuntimeError as error:  # JAX's are among them, and what C++ makes of its own
        raise RunError(
            f"process {process_id}: JAX's coordination service at {coordinator} did not connect "
            f"all processes within {_CONNECT_SECONDS} seconds, although all had joined. One ended "
            "meanwhile, or a stranger had joined under its number. Start all processes again"
        ) from error


def _bind_address(coordinator: str, bind_address: str | None) -> str:
    """Return where JAX's coordination service listens; by default it takes all addresses."""
    host, port = HostPort.parse(coordinator)
    return str(HostPort(bind_address or host, port))


def _register(sites: list[str | None], hosts: list[str]) -> tuple[Process, ...]:
    devices: dict[int, list[jax.Device]] = {index: [] for index in range(len(sites))}
    for device in jax.devices():
        devices[device.process_index].append(device)
    processes = tuple(
        Process(index, site, host, len(devices[index]), devices[index][0].device_kind)
        for index, (site, host) in enumerate(zip(sites, hosts, strict=True))
    )
    register_processes(processes)
    return processes


def _check_addresses(everyone: list[Presence]) -> None:
    """Check that Gloo of every process listens where the other hosts can reach it.

    Gloo listens at the address of the host's own name, which on Debian is often 127.0.1.1.

    Raises:
        UserError: there are several hosts, and one of them resolves its name to itself only.
    """
    if len({presence.host for presence in everyone}) == 1:
        return
    for presence in everyone:
        host, address = presence.host, presence.address
        if address is None or ipaddress.ip_address(address).is_loopback:
            leads = "nowhere" if address is None else f"to {address}"
            raise UserError(
                f"process {presence.process}: the name of its host, {host}, leads {leads} on "
                f"that host, and other hosts cannot reach it. Give {host} its network address in "
                "/etc/hosts there"
            )


def _own_devices(process_id: int, everyone: list[Presence]) -> list[int] | None:
    """Return the visible GPUs that this process takes; None for all of them.

    If the processes of one host all see the same GPUs, and as many as there are processes (a task
    per GPU under SLURM), each takes one.
    """
    own = everyone[process_id]
    together = [presence for presence in everyone if presence.host == own.host]
    if own.gpus is None or len(together) == 1 or len(own.gpus.split(",")) != len(together):
        return None
    if any(presence.gpus != own.gpus for presence in together):
        return None
    return [together.index(own)]
