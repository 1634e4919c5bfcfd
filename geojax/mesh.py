"""The six mesh axes, and which device stands where in the mesh.

    dc       sites
    stage    pipeline stages inside a site
    data     data-parallel replicas inside a site
    expert   groups of experts
    context  pieces of a sequence
    tensor   pieces of a matrix

All six always exist, of size 1 when unused, so that a program names its collectives once. Devices
are laid out with the axis that talks most innermost: `tensor` stays on one host, `dc` is the site.

    >>> make_mesh(dc=2, data=4)     # 8 simulated devices in one process, cut into two sites
    Mesh('dc': 2, 'stage': 1, 'data': 4, 'expert': 1, 'context': 1, 'tensor': 1, ...)
    dc=0: devices 0 1 2 3           dc=1: devices 4 5 6 7
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from geojax.errors import UserError
from geojax.topology import Process, Site, Topology

AXES = ("dc", "stage", "data", "expert", "context", "tensor")
"""The mesh's axes, outermost first."""

_registered: dict[int, Process] = {}


def register_processes(processes: Sequence[Process]) -> None:
    """Say once, at start-up, where each process of this job runs; `make_mesh` asks for it.

    `geojax.runtime.start` calls this with what the processes told each other.
    """
    _registered.clear()
    _registered.update({process.index: process for process in processes})


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
    """A mesh over all `devices` (default: all of the job), its axes `AXES`, of type Auto.

    The dc axis runs over the sites. In one process the devices are simulated sites: the list is
    cut evenly into dc pieces. In several processes a site is made of whole processes: those that
    the topology names, else those that said so at start-up (--site, GEOJAX_SITE), else (a topology
    whose accelerators are as many as the devices, such as one for an ahead-of-time compilation)
    processes fill the topology's sites in the order of their indices. Inside a site devices are
    ordered by host, process and device id, and cut into stage, data, expert, context, tensor, the
    last one innermost.

    Args:
        topology: the sites; None for what is running.
        dc, stage, data, expert, context, tensor: the axes' sizes.
        devices: instead of `jax.devices()`; also devices of an ahead-of-time topology.

    Raises:
        UserError: the sizes do not multiply to the devices, a site does not hold its share, dc is
            not the number of sites, or a tensor group would cross hosts. The message names sizes
            that would work.
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
            f"tensor group stays on one host, so tensor may be {', '.join(fitting)}"
        )
    array = np.empty(len(given), dtype=object)
    array[:] = [device for site in sites for device in site]
    return Mesh(array.reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


GPU_PLATFORMS = ("gpu", "cuda")
"""The names that JAX has for NVIDIA's GPUs."""


def platform_of(mesh: Mesh) -> str:
    """That of the mesh's devices, which a mesh without devices only describes."""
    return str(mesh.abstract_mesh.abstract_device.platform)


def spans_processes(mesh: Mesh | AbstractMesh) -> bool:
    """Whether its devices belong to several processes; those that are only described to none."""
    if isinstance(mesh, AbstractMesh):
        return False
    return len({device.process_index for device in mesh.devices.flat}) > 1


def require_sites(topology: Topology, dc: int) -> None:
    """Raise a UserError unless `dc` is the number of the topology's sites."""
    _require_dc(dc, topology.site_names, f"topology '{topology.name}' has")


def _simulated_sites(
    topology: Topology | None, sizes: dict[str, int], devices: list[jax.Device]
) -> tuple[list[list[jax.Device]], int]:
    """One process's devices cut into dc sites of equal size; and the size of a host."""
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
    """Each site's devices, host by host, where several processes hold them; a host's size."""
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
    """The topology with processes in its sites, or None where there is but one site."""
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
