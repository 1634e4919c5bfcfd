"""Meshes without devices, to plan, trace and lower a step before there is any hardware."""

from collections.abc import Mapping
from typing import cast

from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from geojax.accelerators import Accelerator
from geojax.mesh import AXES
from geojax.runtime.platform import platform_of_accelerator


def abstract_mesh(
    sizes: Mapping[str, int], *, platform: str = "cpu", accelerator: Accelerator | None = None
) -> Mesh:
    """Describe a mesh of the given axis sizes.

    Args:
        sizes: for each of the six axes its size.
        platform: "cpu" or "gpu", where no accelerator says so.
        accelerator: the kind of device; None, a device of `platform`.

    Returns:
        An `AbstractMesh`, typed as the `Mesh` that a `StepPlan` holds: tracing and lowering take
        both.
    """
    kind = platform
    if accelerator is not None and accelerator.device_kinds:
        kind, platform = accelerator.device_kinds[0], platform_of_accelerator(accelerator).name
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh(
        tuple(sizes[axis] for axis in AXES),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        abstract_device=device,
    )
    return cast(Mesh, mesh)
