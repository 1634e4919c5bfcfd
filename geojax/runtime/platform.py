"""Differences between the platforms that geojax compiles for: callers ask, nobody compares names.

On CPUs devices are simulated on the cores of a few hosts and processes reach each other through
Gloo, whose collectives and whose runtime have limits that those of accelerators do not have.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh

from geojax.accelerators import Accelerator
from geojax.errors import UserError

PlatformName: TypeAlias = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Platform:
    """The limits of one platform's devices, runtime and network between processes."""

    name: PlatformName

    host_devices: bool = False
    """Devices are cores of the host: measurements stay small, and compute is in float32."""

    gloo: bool = False
    """Processes reach each other through Gloo, which listens at the address of the hostname. Its
    all-reduce cannot fill a long link, so that sums over sites go in messages of their own."""

    orders_collectives: bool = False
    """Devices may start collectives that do not depend on each other in different orders, and wait
    for each other for ever: a program has to say the order (`geojax.collectives.after`)."""

    branches_hold_collectives: bool = True
    """A branch that all ranks of a collective take may hold it. XLA's runtime for CPUs does not
    keep the collectives of a branch in one order with those beside it."""

    preallocates: bool = False
    """JAX takes a share of a device's memory for its programs when it starts; libraries beside it,
    such as NCCL, need the rest."""

    permutes_by_group: bool = True
    """A permute needs only the devices that send and receive; on CPUs all of the mesh take part."""

    swaps_by_permute: bool = True
    """Two sites swap messages in a permute, which Gloo carries in one round trip. On GPUs they
    gather them. A permute's NCCL communicator spans all the mesh's devices unless XLA is told
    otherwise (openxla/xla#40505), and has the few channels of point-to-point messages. A gather has
    the two devices' communicator, which sums over sites use too."""


CPU = Platform(
    "cpu",
    host_devices=True,
    gloo=True,
    orders_collectives=True,
    branches_hold_collectives=False,
    permutes_by_group=False,
)
GPU = Platform("gpu", swaps_by_permute=False, preallocates=True)

_BY_JAX_NAME = {"cpu": CPU, "gpu": GPU, "cuda": GPU, "rocm": GPU}


def platform_named(name: str) -> Platform:
    """Look up the platform that JAX calls `name`; it has several names for GPUs.

    Raises:
        UserError: geojax does not know it.
    """
    if name not in _BY_JAX_NAME:
        raise UserError(f"platform: JAX runs on '{name}'; geojax runs on {', '.join(_BY_JAX_NAME)}")
    return _BY_JAX_NAME[name]


def platform_of(mesh: Mesh | AbstractMesh) -> Platform:
    """Return the platform of a mesh's devices, which a mesh without devices only describes."""
    return platform_named(mesh.abstract_mesh.abstract_device.platform)


def platform_of_accelerator(accelerator: Accelerator) -> Platform:
    """Return the platform of an accelerator; that of CPUs for one that JAX has no name for."""
    nvidia = any(kind.startswith("NVIDIA ") for kind in accelerator.device_kinds)
    return GPU if nvidia else CPU


def target_platform() -> Platform:
    """Return the platform of the program that is being traced.

    Inside a `shard_map` it is that of the mesh's devices, which may be a topology that this machine
    does not have (an ahead-of-time compile); elsewhere it is JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = getattr(device, "platform", None)
    return platform_named(platform or jax.default_backend())


def compute_capability() -> tuple[int, int]:
    """Return the compute capability of the GPUs of this process.

    A program that is compiled for another machine is taken to be for Hopper GPUs: (9, 0).
    """
    if jax.default_backend() != "gpu":
        return (9, 0)
    major, minor = jax.local_devices()[0].compute_capability.split(".")
    return (int(major), int(minor))


SiteExchange: TypeAlias = Literal["psum", "permute", "all_gather", "all_to_all"]
"""The collective in which sites sum, or exchange messages that each of them sums."""


def site_exchange(platform: Platform, sites: int, *, messages: bool) -> SiteExchange:
    """Choose how `sites` exchange: numbers as they are, or in messages of a wire format.

    With an all-to-all each of more than two sites sums a part and gathers the others' sums.
    """
    if not messages:
        return "psum"
    if sites > 2:
        return "all_to_all"
    return "permute" if platform.swaps_by_permute else "all_gather"


def sums_in_messages(mesh: Mesh | AbstractMesh) -> bool:
    """Return True if float32 sums over the mesh's sites should go in messages instead of a psum.

    That is so where Gloo carries them between processes (see `Platform.gloo`).
    """
    return mesh.shape["dc"] > 1 and platform_of(mesh).gloo and _spans_processes(mesh)


def _spans_processes(mesh: Mesh | AbstractMesh) -> bool:
    if isinstance(mesh, AbstractMesh):  # described devices belong to no process
        return False
    return len({device.process_index for device in mesh.devices.flat}) > 1
