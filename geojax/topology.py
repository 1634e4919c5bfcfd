"""Sites, the links between them, hosts and accelerators: the cluster as data.

The mesh takes the sites from it, and the planner, without touching a device, the links and the
accelerators. It comes from a YAML file, from
the running processes, or is written in Python:

    sites:
      - name: east
        hosts: 192
        accelerators_per_host: 8
        accelerator: h100-sxm
        inside_host: {round_trip_seconds: 2us, bytes_per_second: 450GB/s}
        between_hosts: {round_trip_seconds: 10us, bytes_per_second: 400Gbit/s}
      - name: west
        ...
    links:
      - sites: [east, west]
        round_trip_seconds: 21ms
        bytes_per_second: 3.2Tbit/s

`geojax.quantities` explains the units of times, sizes and rates.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import pydantic

from geojax.accelerators import CATALOG, Accelerator, accelerator_named
from geojax.errors import UserError
from geojax.network_names import SiteName
from geojax.quantities import BytesPerSecond, Count, Seconds
from geojax.settings import Settings, load_settings, preset_path


class Link(Settings):
    """Network between two accelerators, hosts or sites."""

    round_trip_seconds: Seconds
    """Time for a small message and its answer, without queueing."""
    bytes_per_second: BytesPerSecond
    """Bandwidth in each direction, with both directions in use."""


class SiteLink(Link):
    """Link between two sites, shared by everything that crosses it."""

    sites: tuple[SiteName, SiteName]
    """Names of the two sites."""
    reverse_bytes_per_second: BytesPerSecond | None = None
    """Bandwidth from the second site to the first, if different. `bytes_per_second` is then the
    bandwidth from the first site to the second."""

    def towards(self, target: str) -> Link:
        """Return this link with the bandwidth towards the site `target`, one of its two."""
        assert target in self.sites, f"{target} is no end of the link {self.sites}"
        bandwidth = self.bytes_per_second
        if target == self.sites[0] and self.reverse_bytes_per_second is not None:
            bandwidth = self.reverse_bytes_per_second
        return Link(round_trip_seconds=self.round_trip_seconds, bytes_per_second=bandwidth)


class SharedCores(Settings):
    """Times of devices that are simulated on a few cores, which messages between sites need too."""

    devices_per_core: float = pydantic.Field(gt=0, le=2**16)
    """Number of devices that take turns on a core."""
    update_seconds_per_number: float = pydantic.Field(ge=0, le=1)
    """Time in which all devices of a site update a number of their state each (Adam)."""
    message_seconds: Seconds
    """Time of the shortest message over sites in one program."""
    message_bytes_per_second: BytesPerSecond
    """Bandwidth of each device in long messages of one program, all devices of a site at once."""
    processor_seconds_per_byte: float = pydantic.Field(ge=0, le=1)
    """Processor time in which a device sends a byte to another site and receives one."""
    encode_seconds_per_number: dict[str, Annotated[float, pydantic.Field(ge=0, le=1)]]
    """Time in which all devices of a site encode a number each and decode and add the sites', by
    the wire format ("none", "bf16", "int8")."""
    program_seconds: Annotated[float, pydantic.Field(ge=0, le=10)] | None = None
    """Time in which a host starts a program of a hundred arrays on all of its devices; null: not
    measured, 0.3 ms for each device."""


def _from_catalog(value: Any) -> Any:
    return accelerator_named(value) if isinstance(value, str) else value


class Site(Settings):
    """One data center, or a part of it whose accelerators reach each other at full speed."""

    name: SiteName
    """Name of the site, as in a launcher's --site or GEOJAX_SITE."""
    hosts: Count
    """Number of hosts."""
    accelerators_per_host: int = pydantic.Field(ge=1, le=2**16)
    """Number of accelerators that share the fastest links (NVLink, ICI), usually one machine's."""
    accelerator: Annotated[Accelerator, pydantic.BeforeValidator(_from_catalog)]
    """Name from the catalog (h100-sxm, ascend-910b, simulated ...), or a mapping with `name`,
    `peak_flops_per_second`, `memory_bytes` and `memory_bytes_per_second`."""
    inside_host: Link | None = None
    """Network from one accelerator to the others of its host."""
    between_hosts: Link | None = None
    """Network from one accelerator to those of the site's other hosts (its share of the host's
    network cards)."""
    shared_cores: SharedCores | None = None
    """Times of simulated devices that share cores, as `geojax probe` measures them."""
    processes: tuple[Annotated[int, pydantic.Field(ge=0, lt=2**20)], ...] = ()
    """Indices of the JAX processes that run here, host by host. Empty if not known yet; processes
    then fill the sites in the order of their indices."""

    @property
    def accelerators(self) -> int:
        """Number of accelerators in the site."""
        return self.hosts * self.accelerators_per_host


@dataclasses.dataclass(frozen=True)
class Process:
    """One running process, as it describes itself to the others."""

    index: int
    """JAX's process index."""
    site: str | None
    """Name of the site where it runs; None if it was not given."""
    host: str
    """Host name, which the processes of one machine share."""
    devices: int
    """Number of devices that it drives."""
    device_kind: str
    """JAX's name of the kind of these devices."""


class Topology(Settings):
    """All sites and the links between them.

    Example:
        >>> topology = geojax.Topology.load("two-h100-sites")  # or the path of a YAML file
        >>> topology.site_names
        ('east', 'west')
        >>> topology.link("east", "west").round_trip_seconds
        0.021
    """

    name: str = "unnamed"
    """Name in messages; for a file, its name without .yaml."""
    sites: tuple[Site, ...] = pydantic.Field(min_length=1)
    """Sites, in the order of the mesh's dc axis."""
    links: tuple[SiteLink, ...] = ()
    """Links, at most one for each pair of sites."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        names = self.site_names
        if len(set(names)) < len(names):
            raise ValueError(f"two sites have the same name: {', '.join(names)}")
        seen = set()
        for link in self.links:
            first, second = link.sites
            for site in link.sites:
                if site not in names:
                    raise ValueError(
                        f"a link names the site '{site}'; the sites are {', '.join(names)}"
                    )
            if first == second:
                raise ValueError(
                    f"a link joins '{first}' with itself; a site's own network is its between_hosts"
                )
            if frozenset(link.sites) in seen:
                raise ValueError(f"there are two links between '{first}' and '{second}'")
            seen.add(frozenset(link.sites))
        processes = [process for site in self.sites for process in site.processes]
        if len(set(processes)) < len(processes):
            raise ValueError(f"a process lies in two sites: {sorted(processes)}")
        if processes and not all(site.processes for site in self.sites):
            raise ValueError("some sites name their processes and others do not")
        return self

    @property
    def site_names(self) -> tuple[str, ...]:
        """Names of the sites, in the order of the dc axis."""
        return tuple(site.name for site in self.sites)

    @property
    def accelerators(self) -> int:
        """Number of accelerators in all sites together."""
        return sum(site.accelerators for site in self.sites)

    def site(self, name: str) -> Site:
        """Return the site called `name`.

        Raises:
            UserError: there is none of that name.
        """
        for site in self.sites:
            if site.name == name:
                return site
        raise UserError(
            f"topology '{self.name}' has no site '{name}'; its sites are "
            f"{', '.join(self.site_names)}"
        )

    def link(self, source: str, target: str) -> Link:
        """Return the link between two different sites, with the bandwidth of that direction.

        Raises:
            UserError: a site is unknown, or the topology does not describe that link.
        """
        ends = {self.site(source).name, self.site(target).name}
        for link in self.links:
            if set(link.sites) == ends:
                return link.towards(target)
        raise UserError(
            f"topology '{self.name}' says nothing of the link between '{source}' and '{target}'; "
            "add its round_trip_seconds and bytes_per_second under links"
        )

    def links_of(self, site: str) -> dict[str, Link]:
        """Return the links from a site, by the name of the other one; none if it is unknown."""
        return {
            other: link.towards(other)
            for link in self.links
            if site in link.sites
            for other in link.sites
            if other != site
        }

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Topology":
        """Read a topology from a YAML file, or the preset of that name in configs/topology.

        A name that ends in .yaml or .yml or has a slash is a path.

        Raises:
            UserError: there is no such preset or file, or it has a mistake.
        """
        text = str(name_or_path)
        is_path = isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml"))
        path = Path(name_or_path) if is_path else preset_path("topology", text)
        return load_settings(cls, path, {"name": path.stem})

    @classmethod
    def from_processes(
        cls, processes: Iterable[Process], described_by: "Topology | None" = None
    ) -> "Topology":
        """Make the topology of these running processes.

        Processes that name no site form one. Sites come in the order of their first process, unless
        `described_by` (a topology file) gives an order. Such a file also gives accelerators, links
        and the size of a host; the number of hosts still follows from the processes.

        Raises:
            UserError: hosts of one site have different numbers of devices, or a process lies in a
                site that `described_by` does not know, or one of its sites has no process.
        """
        by_site: dict[str, list[Process]] = {}
        for process in sorted(processes, key=lambda process: process.index):
            by_site.setdefault(process.site or "site", []).append(process)
        if described_by is None:
            sites = tuple(_site_of(name, members) for name, members in by_site.items())
            return cls(name="running processes", sites=sites)
        for name in by_site:
            described_by.site(name)  # refuses a name that the topology does not know
        empty = [name for name in described_by.site_names if name not in by_site]
        if empty:
            raise UserError(
                f"no process runs in site '{empty[0]}' of topology '{described_by.name}'; the "
                f"processes lie in {', '.join(by_site)}"
            )
        sites = tuple(_running(site, by_site[site.name]) for site in described_by.sites)
        return described_by.model_copy(update={"sites": sites})

    def fill(self, devices_of_process: Mapping[int, int]) -> "Topology":
        """Fill the sites with processes in the order of their indices.

        It is for processes that do not name their site, as in an ahead-of-time compilation;
        `devices_of_process` gives each one's number of devices.

        Raises:
            UserError: the devices are not as many as the accelerators, or a process would lie in
                two sites.
        """
        devices = sum(devices_of_process.values())
        if devices != self.accelerators:
            raise UserError(
                f"topology '{self.name}' has {self.accelerators} accelerators, but there are "
                f"{devices} devices"
            )
        remaining = iter(sorted(devices_of_process))
        sites = []
        for site in self.sites:
            members: list[int] = []
            held = 0
            while held < site.accelerators:
                members.append(next(remaining))
                held += devices_of_process[members[-1]]
            if held > site.accelerators:
                raise UserError(
                    f"process {members[-1]} would lie in two sites: site '{site.name}' of topology "
                    f"'{self.name}' has {site.accelerators} accelerators, and its processes up to "
                    f"this one have {held} devices. Each process must lie in one site"
                )
            sites.append(site.model_copy(update={"processes": tuple(members)}))
        return self.model_copy(update={"sites": tuple(sites)})


def _host_by_host(processes: list[Process]) -> list[list[Process]]:
    """Group the processes of one site by host, in the order of the hosts' first processes."""
    hosts: dict[str, list[Process]] = {}
    for process in processes:
        hosts.setdefault(process.host, []).append(process)
    return list(hosts.values())


def _site_of(name: str, processes: list[Process]) -> Site:
    hosts = _host_by_host(processes)
    sizes = sorted({sum(process.devices for process in host) for host in hosts})
    if len(sizes) > 1:
        raise UserError(
            f"the hosts of site '{name}' drive {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} "
            "devices; every host of a site must drive the same number"
        )
    kind = processes[0].device_kind
    known = [entry for entry in CATALOG.values() if kind in entry.device_kinds]
    return Site(
        name=name,
        hosts=len(hosts),
        accelerators_per_host=sizes[0],
        accelerator=known[0] if known else Accelerator(name=kind),
        processes=tuple(process.index for process in itertools.chain.from_iterable(hosts)),
    )


def _running(site: Site, processes: list[Process]) -> Site:
    devices = sum(process.devices for process in processes)
    if devices % site.accelerators_per_host:
        raise UserError(
            f"the processes in site '{site.name}' drive {devices} devices, which is not a multiple "
            f"of its {site.accelerators_per_host} accelerators per host"
        )
    ordered = itertools.chain.from_iterable(_host_by_host(processes))
    return site.model_copy(
        update={
            "hosts": devices // site.accelerators_per_host,
            "processes": tuple(process.index for process in ordered),
        }
    )
