"""Accelerators that this machine need not have, to compile programs for: `h100:3072`, `cpu:8`.

XLA compiles for an NVIDIA GPU from a description of it, with the libraries of `jax[cuda13]` (the
extra `aot`) and no driver. For CPUs it compiles for simulated devices of this process.
"""

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from geojax.accelerators import Accelerator, accelerator_named
from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.runtime import simulate_devices
from geojax.topology import Site, Topology

MOST_SIMULATED_DEVICES = 64
"""Most simulated devices to compile for: each has threads in this process."""

_GPUS_PER_HOST = 8
"""GPUs of a host where no topology gives their number: those of an NVIDIA HGX board."""

_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  runtime_version: "13.0.0" driver_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

_ACCELERATORS = {"h100": "h100-sxm", "cpu": "simulated"}
"""The catalog's accelerator of each kind of target."""


@dataclass(frozen=True)
class CompileTarget:
    """A kind of accelerator and the number of devices that a step is compiled for."""

    kind: str
    """One of the keys of `_ACCELERATORS`."""
    devices: int
    """Number of devices at all sites."""

    @classmethod
    def parse(cls, text: str) -> "CompileTarget":
        """Read `h100:3072` or `cpu:8`.

        Raises:
            UserError: the kind is unknown, or the number is none.
        """
        kind, _, count = text.partition(":")
        known = " or ".join(f"{name}:NUMBER" for name in _ACCELERATORS)
        if kind not in _ACCELERATORS or not (count.isascii() and count.isdigit()) or len(count) > 6:
            raise UserError(f"--target {text}: a target is {known}, such as h100:3072")
        if int(count) == 0:
            raise UserError(f"--target {text}: there must be at least one device")
        return cls(kind, int(count))

    @classmethod
    def of(cls, accelerator: Accelerator | None, devices: int) -> "CompileTarget":
        """Return the target of a run's accelerators; None stands for simulated devices.

        Raises:
            UserError: programs cannot be compiled ahead of time for that accelerator.
        """
        name = accelerator.name if accelerator is not None else _ACCELERATORS["cpu"]
        kinds = {known: kind for kind, known in _ACCELERATORS.items()}
        if name not in kinds:
            raise UserError(
                f"--compile: programs cannot be compiled ahead of time for {name}; set "
                f"--target, such as h100:{devices}"
            )
        return cls(kinds[name], devices)

    def __str__(self) -> str:
        return f"{self.kind}:{self.devices}"

    def require_compiler(self) -> None:
        """Check that there is a compiler for the target.

        Raises:
            UserError: the extra `aot` is not installed.
        """
        if self.kind != "cpu" and importlib.util.find_spec("jax_cuda13_plugin") is None:
            raise UserError(
                f"--target {self.kind}: XLA's compiler for GPUs is not installed here; install "
                "geojax-trainer[aot] (jax[cuda13]), which needs no GPU"
            )

    @property
    def accelerator(self) -> Accelerator:
        """The catalog's entry for the devices."""
        return accelerator_named(_ACCELERATORS[self.kind])

    def mesh(self, sizes: Mapping[str, Any], topology: Topology | None) -> Mesh:
        """Make the mesh of a run over the target's devices; no accelerator is touched.

        Args:
            sizes: the size of each mesh axis.
            topology: the run's sites; None, or one of another number of accelerators, for `dc`
                equal sites with hosts of eight.

        Raises:
            UserError: the sizes do not multiply to the devices, or the layout does not fit the
                topology.
        """
        if self.kind == "cpu":
            if self.devices > MOST_SIMULATED_DEVICES:
                raise UserError(
                    f"--target {self}: at most {MOST_SIMULATED_DEVICES} devices are simulated; "
                    f"compile for h100:{self.devices}"
                )
            simulate_devices(self.devices)
            return make_mesh(topology, **sizes)
        product = math.prod(sizes.values())
        if product != self.devices:
            used = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
            raise UserError(
                f"--target {self}: {used or 'data=1'} makes {product} devices, but there are "
                f"{self.devices}; set --target {self.kind}:{product}, or the mesh"
            )
        topology = self.topology(sizes["dc"], topology)
        (site, *others) = topology.sites
        if any(
            (each.hosts, each.accelerators_per_host) != (site.hosts, site.accelerators_per_host)
            for each in others
        ):
            raise UserError(
                f"--target {self}: the sites of topology '{topology.name}' differ; programs are "
                "compiled ahead of time for equal sites"
            )
        devices = gpus(len(topology.sites), site.hosts, site.accelerators_per_host)
        return make_mesh(topology, devices=devices, **sizes)

    def topology(self, sites: int, topology: Topology | None) -> Topology:
        """Return `topology` if it has as many devices, otherwise equal sites without links.

        Raises:
            UserError: the devices cannot be divided among so many sites.
        """
        if topology is None or topology.accelerators != self.devices:
            return self.equal_sites(sites)
        return topology

    def equal_sites(self, sites: int) -> Topology:
        """Describe that many equal sites of hosts with eight GPUs, or of one smaller host.

        Raises:
            UserError: the devices cannot be divided so.
        """
        share, rest = divmod(self.devices, sites)
        per_host = min(_GPUS_PER_HOST, share)
        if rest or not per_host or share % per_host:
            raise UserError(
                f"--target {self}: {sites} equal sites of hosts with {_GPUS_PER_HOST} GPUs need a "
                f"multiple of {sites * _GPUS_PER_HOST} devices; give a topology for other hosts"
            )
        sites_alike = (
            Site(
                name=f"site{number}",
                hosts=share // per_host,
                accelerators_per_host=per_host,
                accelerator=self.accelerator,
            )
            for number in range(sites)
        )
        return Topology(name=str(self), sites=tuple(sites_alike))


def gpus(
    sites: int, hosts: int, per_host: int, *, hosts_per_nvlink: int | None = None
) -> list[jax.Device]:
    """Return H100s to compile for: `per_host` in each of `hosts` hosts at each of `sites` sites.

    Args:
        sites: number of sites.
        hosts: hosts of a site.
        per_host: GPUs of a host.
        hosts_per_nvlink: hosts whose GPUs XLA takes for joined by NVLink; None: those of a site.
    """
    joined = hosts_per_nvlink or hosts
    described = topologies.get_topology_desc(
        "h100",
        platform="cuda",
        target_config=_H100,
        topology=f"{sites * hosts // joined}x{joined}x{per_host}",
    )
    devices: list[jax.Device] = list(described.devices)
    return devices
