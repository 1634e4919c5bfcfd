"""The six mesh axes, and the order of devices in the mesh.

    dc       sites
    stage    pipeline stages inside a site
    data     data-parallel replicas inside a site
    expert   groups of experts
    context  pieces of a sequence
    tensor   pieces of a matrix

All six always exist, of size 1 when unused, so that a program names its collectives once. Devices
are laid out with the axis of most traffic innermost: `tensor` stays on one host, `dc` is the site.

    >>> make_mesh(dc=2, data=4)     # 8 simulated devices in one process, divided into 2 sites
    Mesh('dc': 2, 'stage': 1, 'data': 4, 'expert': 1, 'context': 1, 'tensor': 1, ...)
    dc=0: devices 0 1 2 3           dc=1: devices 4 5 6 7
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from geojax.errors import UserError
from geojax.suggestions import listed
from geojax.topology import Process, Site, Topology

AXES = ("dc", "stage", "data", "expert", "context", "tensor")
"""The mesh's axes, outermost first."""

_registered: dict[int, Process] = {}


def register_processes(processes: Sequence[Process]) -> None:
    """Register the site and host of each process of this job, which `make_mesh` uses.

    `geojax.runtime.start` calls this once, with what the processes told each other.
    """
    _registered.clear()
    _registered.update({process.index: process for process in processes})


def index_on_host(process: int) -> int:
    """Return the index of a process of this job among those that run on its host."""
    if (found := _registered.get(process)) is None:
        return 0
    return sum(each.host == found.host and each.index < process for each in _registered.values())


def make_mesh(
    topology: Topology | None = None,
    *,
    dc: int = 1,
    stage: int = 1,
    data: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Make a mesh with axes `AXES`, of type Auto, over all devices of the job.

    The dc axis runs over the sites. In one process the sites are simulated: the devices are divided
    evenly into dc parts. In several processes a site consists of whole processes. The topology may
    name the processes of a site; otherwise processes name their site at start-up (--site,
    GEOJAX_SITE). Without either, processes fill the sites of a topology in the order of their
    indices, if it has as many accelerators as there are devices. Inside a site devices are ordered
    by host, process and device id, and divided into stage, data, expert, context, tensor, the last
    one innermost.

    Args:
        topology: the sites; None for those of the running processes.
        dc, stage, data, expert, context, tensor: the sizes of the axes.
        devices: devices to use instead of `jax.devices()`, for instance ahead-of-time ones.

    Raises:
        UserError: the sizes do not multiply to the devices, a site does not hold its share, dc is
            not the number of sites, or a tensor group would cross hosts. The message names sizes
            that would work.

    Example:
        >>> mesh = geojax.make_mesh(dc=2, data=4)  # eight devices, four in each of two sites
        >>> dict(mesh.shape)
        {'dc': 2, 'stage': 1, 'data': 4, 'expert': 1, 'context': 1, 'tensor': 1}
    """
    sizes = dict(zip(AXES, (dc, stage, data, expert, context, tensor), strict=True))
    for axis, size in sizes.items():
        if size < 1:
            raise UserError(f"mesh axis {axis}={size}: a size is at least 1")
    given = list(jax.devices() if devices is None else devices)
    of_process: dict[int, list[jax.Device]] = {}
    for device in sorted(given, key=lambda device: device.id):
        of_process.setdefault(device.process_index, []).append(device)

    if len(of_process) == 1:
        sites, per_host = _simulated_sites(topology, sizes, *of_process.values())
    else:
        sites, per_host = _sites_of_processes(topology, sizes, of_process)
    if sizes["tensor"] > per_host or per_host % sizes["tensor"]:
        fitting = [str(size) for size in range(1, per_host + 1) if per_host % size == 0]
        raise UserError(
            f"tensor={sizes['tensor']} does not fit into a host of {per_host} accelerators: a "
            f"tensor group stays on one host, so tensor may be {listed(fitting)}"
        )
    array = np.empty(len(given), dtype=object)
    array[:] = [device for site in sites for device in site]
    return Mesh(array.reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def site_names(mesh: Mesh, topology: Topology | None = None) -> tuple[str, ...]:
    """Name the sites along `dc`: as their processes do, else as the topology, else by number."""
    devices = mesh.devices.reshape(mesh.shape["dc"], -1)[:, 0]
    running = [_registered.get(device.process_index) for device in devices]
    names = [process.site for process in running if process is not None and process.site]
    if len(set(names)) == len(devices):
        return tuple(names)
    if topology is not None and len(topology.sites) == len(devices):
        return topology.site_names
    return tuple(f"site{index}" for index in range(len(devices)))


def leads_site(mesh: Mesh) -> bool:
    """Return True in one process of each site, which does what one process has to do for all."""
    first = mesh.devices.reshape(mesh.shape["dc"], -1)[:, 0]
    return jax.process_index() in {device.process_index for device in first}


GPU_PLATFORMS = ("gpu", "cuda")
"""JAX's names of the platform of NVIDIA's GPUs."""


def require_sites(topology: Topology, dc: int) -> None:
    """Raise a UserError unless `dc` is the number of the topology's sites."""
    _require_dc(dc, topology.site_names, f"topology '{topology.name}' has")


def _simulated_sites(
    topology: Topology | None, sizes: dict[str, int], devices: list[jax.Device]
) -> tuple[list[list[jax.Device]], int]:
    """Divide one process's devices into dc sites of equal size; return them and a host's size."""
    if topology is not None:
        require_sites(topology, sizes["dc"])
    _require_product(sizes, devices, dc_is_free=topology is None)
    share = len(devices) // sizes["dc"]
    sites = [devices[start : start + share] for start in range(0, len(devices), share)]
    if topology is None:
        return sites, share
    if all(site.accelerators == share for site in topology.sites):
        return sites, math.gcd(*(site.accelerators_per_host for site in topology.sites))
    if all(device.platform == "cpu" for device in devices):
        return sites, share  # a few simulated devices stand in for a large topology
    raise UserError(
        f"topology '{topology.name}' has {topology.accelerators} accelerators, but there are "
        f"{len(devices)} devices"
    )


def _sites_of_processes(
    topology: Topology | None, sizes: dict[str, int], of_process: dict[int, list[jax.Device]]
) -> tuple[list[list[jax.Device]], int]:
    """Return each site's devices in several processes, host by host, and the size of a host."""
    devices = [device for members in of_process.values() for device in members]
    topology = _located(topology, sizes["dc"], of_process)
    if topology is None:  # all of them in one site, each process a host
        _require_product(sizes, devices, dc_is_free=False)
        ordered = [device for process in sorted(of_process) for device in of_process[process]]
        return [ordered], math.gcd(*(len(members) for members in of_process.values()))
    sites = {
        site.name: [device for process in site.processes for device in of_process.get(process, [])]
        for site in topology.sites
    }
    placed = {process for site in topology.sites for process in site.processes}
    lost = sorted(set(of_process) - placed)
    if lost:
        raise UserError(f"topology '{topology.name}' places process {lost[0]} in no site")
    sites = {name: members for name, members in sites.items() if members}
    _require_dc(sizes["dc"], tuple(sites), "the devices lie in")
    held = {name: len(members) for name, members in sites.items()}
    if len(set(held.values())) > 1:
        raise UserError(
            f"the sites hold different numbers of devices ({_listed(held)}): every site must hold "
            f"the same share; pass {min(held.values())} devices of each, in whole processes"
        )
    _require_product(sizes, devices, dc_is_free=False)
    per_host = math.gcd(
        *(_host_size(topology.site(name), members, of_process) for name, members in sites.items())
    )
    return list(sites.values()), per_host


def _host_size(
    site: Site, members: list[jax.Device], of_process: dict[int, list[jax.Device]]
) -> int:
    if len(members) == site.accelerators:
        return site.accelerators_per_host
    # Only some of the site's devices were given: what surely lies on one host is a process.
    given = (len(of_process[process]) for process in site.processes if process in of_process)
    return math.gcd(site.accelerators_per_host, *given)


def _located(
    topology: Topology | None, dc: int, of_process: dict[int, list[jax.Device]]
) -> Topology | None:
    """Return the topology with processes in its sites, or None if there is only one site."""
    if topology is not None and topology.sites[0].processes:
        return topology
    running = set(of_process) <= set(_registered)
    sites_named = running and all(process.site for process in _registered.values())
    if sites_named or (running and topology is None and dc == 1):
        return Topology.from_processes(_registered.values(), described_by=topology)
    if topology is not None:
        return topology.fill({process: len(members) for process, members in of_process.items()})
    if dc > 1:
        raise UserError(
            f"dc={dc}, but nothing says which of the {len(of_process)} processes run in which "
            "site: set GEOJAX_SITE (or --site) for each of them, or give a topology"
        )
    return None


def _require_dc(dc: int, sites: Sequence[str], where: str) -> None:
    if dc != len(sites):
        raise UserError(
            f"dc={dc}, but {where} {len(sites)} site(s) ({', '.join(sites)}): dc must be "
            f"{len(sites)}"
        )


def _require_product(
    sizes: dict[str, int], devices: Sequence[jax.Device], dc_is_free: bool
) -> None:
    total, product = len(devices), math.prod(sizes.values())
    if product == total:
        return
    working = []
    # The axes that were asked for, and data, which takes what is left over.
    for axis in sorted(sizes, key=lambda axis: axis == "data"):
        if sizes[axis] == 1 and axis != "data":
            continue
        others = product // sizes[axis]
        if total % others == 0 and (axis != "dc" or dc_is_free):
            working.append(f"{axis}={total // others}")
    used = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"
    what = f"{used} makes {product} devices, but there are {total}"
    hint = (
        f"{' or '.join(working)} would work" if working else (f"the sizes must multiply to {total}")
    )
    if all(device.platform == "cpu" for device in devices):
        hint += f"; or simulate {product} devices"
        processes = len({device.process_index for device in devices})
        if processes > 1 and product % processes == 0:
            hint += (
                f" in all, {product // processes} in each of the {processes} processes (geojax "
                f"launch --devices-per-process {product // processes})"
            )
    raise UserError(f"{what}: {hint}")


def _listed(held: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in held.items())
