"""Hosts of a run that is started over ssh, in a YAML file.

    sites:
      - {name: east, hosts: [east1, east2]}
      - {name: west, hosts: [west1, west2]}
    coordinator: 10.1.0.1:61440      # where the other hosts reach the first one; default: its name
    directory: /shared/geojax        # where the command runs; default: the launcher's own
    python: /shared/.venv/bin/python # that runs geojax; default: the launcher's own

Each host runs one process with all of its accelerators, and needs a key that ssh accepts without
asking. The launcher's GEOJAX_, JAX_, XLA_ and NCCL_ variables, PYTHONPATH and LD_LIBRARY_PATH are
passed on. The key of the run goes through the connection, not onto a command line. As islands every
site is a job of its own; the coordinator is then where all sites meet.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pydantic

from geojax.errors import UserError
from geojax.job.cluster_env import FIRST_PORT, KEY_VARIABLE
from geojax.job.island_env import ISLANDS_PORT, first_port_of, island_env
from geojax.launch import reaper
from geojax.launch.workers import Worker, new_key, worker_env
from geojax.network_names import HostAndPort, HostPort, SiteName, SshHost, is_loopback
from geojax.settings import Settings, load_settings

_PASSED_ON = ("GEOJAX_", "JAX_", "XLA_", "NCCL_", "PYTHONPATH", "LD_LIBRARY_PATH")
# There is no terminal to answer questions; and the loss of a host must be noticed.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15")


class SiteHosts(Settings):
    """Hosts of one site."""

    name: SiteName
    """Name of the site in the topology."""
    hosts: tuple[SshHost, ...] = pydantic.Field(min_length=1)
    """Hosts as ssh knows them: `east1`, `me@10.1.0.1`."""


class Hosts(Settings):
    """Hosts of all sites and what runs on each, as in the module's example."""

    sites: tuple[SiteHosts, ...] = pydantic.Field(min_length=1)
    """Sites, in the order of the mesh's dc axis."""
    coordinator: HostAndPort | None = None
    """host:port where the other hosts reach the first one. None: its name, and geojax's port."""
    directory: Path | None = None
    """Directory in which the command runs on every host. None: the launcher's own."""
    python: str | None = None
    """Python that runs the reaper and geojax on every host. None: the launcher's own."""

    @pydantic.model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [site.name for site in self.sites]
        if len(set(names)) < len(names):
            raise ValueError(f"two sites have the same name: {', '.join(names)}")
        return self

    @classmethod
    def load(cls, path: Path) -> "Hosts":
        """Read the hosts from a YAML file.

        Raises:
            UserError: there is no such file, or it has a mistake.
        """
        return load_settings(cls, path)

    def workers(
        self,
        command: Sequence[str],
        *,
        simulated_devices: int | None,
        grace_seconds: float,
        islands: bool = False,
    ) -> list[Worker]:
        """Make the workers of the run, one a host.

        Args:
            command: see `local_workers`, as for the next two.
            simulated_devices: see there.
            grace_seconds: see there.
            islands: make each site a job of its own.

        Raises:
            UserError: a host has no address, or the coordinator's leads other hosts to themselves.
        """
        hosts = [(site.name, host) for site in self.sites for host in site.hosts]
        for _, host in hosts:
            _require_address(host)
        places = (self._places_in_jobs if islands else self._places_in_one_job)(simulated_devices)
        key = new_key()
        passed_on = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_PASSED_ON) and name != KEY_VARIABLE
        }
        # The directory is this process's, where a symbolic link in $PWD reads better to others.
        directory = self.directory or Path(os.environ.get("PWD") or Path.cwd())
        source = Path(reaper.__file__).read_text(encoding="utf-8")
        workers = []
        for process, ((site, host), env) in enumerate(zip(hosts, places, strict=True)):
            variables = [f"{name}={value}" for name, value in sorted((passed_on | env).items())]
            reaped = [self.python or sys.executable, "-I", "-c", source, f"{grace_seconds:g}"]
            line = shlex.join(["exec", "env", *variables, *reaped, *command])
            remote = f"cd {shlex.quote(str(directory))} && {line}"
            script = f"IFS= read -r {KEY_VARIABLE} && export {KEY_VARIABLE} && {remote}"
            remote = shlex.join(["exec", "sh", "-c", script])
            workers.append(Worker(process, site, (*_SSH, host, remote), {}, host, key))
        return workers

    def _places_in_one_job(self, simulated_devices: int | None) -> list[dict[str, str]]:
        """Return the variables of each process, by which it finds its place."""
        hosts = [(site.name, host) for site in self.sites for host in site.hosts]
        coordinator = self._checked_coordinator([host for _, host in hosts], FIRST_PORT)
        return [
            worker_env(process, len(hosts), coordinator, site, simulated_devices)
            for process, (site, _) in enumerate(hosts)
        ]

    def _places_in_jobs(self, simulated_devices: int | None) -> list[dict[str, str]]:
        """Return the variables of each process, where each site is a job of its own."""
        hosts = [host for site in self.sites for host in site.hosts]
        first = self._checked_coordinator(hosts, ISLANDS_PORT)
        first_hosts = [site.hosts[0] for site in self.sites]
        meetings = [first]
        for number, host in enumerate(first_hosts[1:], 1):
            door_port = ISLANDS_PORT - first_hosts[:number].count(host)
            meetings.append(str(HostPort(_connected_to(host)[0], door_port)))
        names = tuple(site.name for site in self.sites)
        earlier: Counter[str] = Counter()
        places = []
        for site in self.sites:
            coordinator = str(HostPort(_connected_to(site.hosts[0])[0], FIRST_PORT))
            for process, host in enumerate(site.hosts):
                port = first_port_of(os.environ, earlier[host])
                together = island_env(names, meetings, None, port)
                own = worker_env(
                    process, len(site.hosts), coordinator, site.name, simulated_devices
                )
                places.append(own | together)
            earlier.update(site.hosts)
        return places

    def _checked_coordinator(self, hosts: list[str], port: int) -> str:
        if self.coordinator is not None:
            coordinator = HostPort.parse(self.coordinator)
        else:
            coordinator = HostPort(_connected_to(hosts[0])[0], port)
        if len(set(hosts)) == 1:
            return str(coordinator)
        where = "coordinator" if self.coordinator else f"the first host, {hosts[0]}"
        right = f"give an address that the {len(hosts)} hosts reach: coordinator: 10.1.0.1:61440"
        if is_loopback(coordinator.host):
            raise UserError(f"{where}: {coordinator.host} leads every host to itself; {right}")
        return str(coordinator)


def _require_address(host: str) -> None:
    name, directly = _connected_to(host)
    if not directly:
        return  # the hosts between know more names
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise UserError(
            f"host {host}: {name} has no address here ({error.strerror}); correct the name in the "
            "file of the hosts, or define it in ~/.ssh/config"
        ) from None


def _connected_to(host: str) -> tuple[str, bool]:
    """Return the name or address to which ssh connects for `host`, and True if it does directly."""
    try:
        done = subprocess.run([*_SSH, "-G", host], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"ssh cannot be run ({error.strerror}): install it") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UserError(f"host {host}: ssh refuses it: {words[0]}")
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    options = {name: value for name, _, value in lines}
    directly = not {"proxyjump", "proxycommand"} & options.keys()
    return options.get("hostname", host.rpartition("@")[2]), directly
