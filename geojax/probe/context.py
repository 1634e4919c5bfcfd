"""The processes that are probed: their sites and hosts, and a mesh over all of their devices."""

import dataclasses

import jax
from jax.sharding import Mesh

from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.topology import Process, Topology
from geojax.wan import SITE_NAMES


@dataclasses.dataclass(frozen=True)
class ProbeContext:
    """The running processes, by site and host."""

    processes: tuple[Process, ...]
    """Processes of the job, by their index."""
    topology: Topology
    """Sites of the processes, in the order of the mesh's dc axis, and links if they are known."""
    mesh: Mesh
    """Mesh of sites (dc), hosts of a site (data) and accelerators of a host (tensor)."""

    @classmethod
    def of(
        cls, processes: tuple[Process, ...], described_by: Topology | None, simulated_sites: int
    ) -> "ProbeContext":
        """Make the context of a job.

        Args:
            processes: the processes, as `geojax.runtime.start` returned them.
            described_by: a topology that describes the sites, if any.
            simulated_sites: number of sites into which the devices of a single process are divided.

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
        """Devices of this process, each with the name of its site."""
        return [
            (name, device)
            for name, members in zip(self.topology.site_names, self.mesh.devices, strict=True)
            for device in members.flat
            if device.process_index == jax.process_index()
        ]

    @property
    def own_site(self) -> str:
        """Site of this process; the first one if it simulates several."""
        return self.own_devices[0][0]

    @property
    def own_host(self) -> str:
        """Name of this process's host."""
        return self.processes[jax.process_index()].host

    @property
    def first_processes(self) -> dict[str, int]:
        """Process of each site that measures its links; {} in a job of one process."""
        if len(self.processes) == 1:
            return {}
        return {site.name: min(site.processes) for site in self.topology.sites}

    def turn(self) -> tuple[int, int]:
        """Return this process's number among those on its host, and the most on any host."""
        by_host: dict[str, list[int]] = {}
        for process in self.processes:
            by_host.setdefault(process.host, []).append(process.index)
        own = by_host[self.own_host].index(jax.process_index())
        return own, max(map(len, by_host.values()))


def _simulated(process: Process, described_by: Topology | None, sites: int) -> Topology:
    """Divide one process's devices evenly into sites of one host each."""
    if process.devices % sites:
        raise UserError(
            f"{process.devices} devices do not divide into {sites} sites: simulate "
            f"{-(-process.devices // sites) * sites} devices"
        )
    names = SITE_NAMES[:sites] if sites > 1 else (process.site or "site",)
    if described_by is not None:
        names = described_by.site_names
    undivided = Topology.from_processes([process]).sites[0]
    share = {"hosts": 1, "accelerators_per_host": process.devices // sites, "processes": ()}
    found = tuple(undivided.model_copy(update={"name": name, **share}) for name in names)
    links = described_by.links if described_by is not None else ()
    return Topology(name="running processes", sites=found, links=links)
