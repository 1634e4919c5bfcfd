"""Where everything that is probed stands: sites, their hosts, the mesh over all devices."""

import dataclasses

import jax
from jax.sharding import Mesh

from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.topology import Process, Topology
from geojax.wan import SITE_NAMES


@dataclasses.dataclass(frozen=True)
class Places:
    """The running processes, by site and host."""

    processes: tuple[Process, ...]
    """All of the job, in the order of their indices."""
    topology: Topology
    """What runs: its sites in the order of the mesh's dc axis, with what is known of the links."""
    mesh: Mesh
    """dc: sites. data: the hosts of a site. tensor: the accelerators of a host."""

    @classmethod
    def of(
        cls, processes: tuple[Process, ...], described_by: Topology | None, simulated_sites: int
    ) -> "Places":
        """Those of a job.

        Args:
            processes: what `geojax.runtime.start` returned.
            described_by: what is known of the sites.
            simulated_sites: into how many sites the devices of a job of one process are cut.

        Raises:
            UserError: hosts or sites have different numbers of devices, or are not those described.
        """
        if len(processes) == 1:
            topology = _simulated(processes[0], described_by, simulated_sites)
        else:
            topology = Topology.from_processes(processes, described_by)
        first = topology.sites[0]
        mesh = make_mesh(
            topology if len(processes) > 1 else None,
            dc=len(topology.sites),
            data=first.hosts,
            tensor=first.accelerators_per_host,
        )
        return cls(processes, topology, mesh)

    @property
    def own_devices(self) -> list[tuple[str, jax.Device]]:
        """This process's devices, each with the name of its site."""
        return [
            (name, device)
            for name, members in zip(self.topology.site_names, self.mesh.devices, strict=True)
            for device in members.flat
            if device.process_index == jax.process_index()
        ]

    @property
    def own_site(self) -> str:
        """The site of this process; the first one where it simulates several."""
        return self.own_devices[0][0]

    @property
    def own_host(self) -> str:
        """The name of this process's host."""
        return self.processes[jax.process_index()].host

    @property
    def first_processes(self) -> dict[str, int]:
        """The process that speaks for each site over its links; {} where one process is all."""
        if len(self.processes) == 1:
            return {}
        return {site.name: min(site.processes) for site in self.topology.sites}

    def turn(self) -> tuple[int, int]:
        """This process's number among those that share its machine, and the most that share one."""
        by_host: dict[str, list[int]] = {}
        for process in self.processes:
            by_host.setdefault(process.host, []).append(process.index)
        own = by_host[self.own_host].index(jax.process_index())
        return own, max(map(len, by_host.values()))


def _simulated(process: Process, described_by: Topology | None, sites: int) -> Topology:
    """One process's devices cut evenly into sites, a host in each."""
    if process.devices % sites:
        raise UserError(
            f"{process.devices} devices do not divide into {sites} sites: simulate "
            f"{-(-process.devices // sites) * sites} devices"
        )
    names = SITE_NAMES[:sites] if sites > 1 else (process.site or "site",)
    if described_by is not None:
        names = described_by.site_names
    plain = Topology.from_processes([process]).sites[0]
    share = {"hosts": 1, "accelerators_per_host": process.devices // sites, "processes": ()}
    found = tuple(plain.model_copy(update={"name": name, **share}) for name in names)
    links = described_by.links if described_by is not None else ()
    return Topology(name="running processes", sites=found, links=links)
