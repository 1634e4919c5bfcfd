"""The part of a device's memory that a program may fill.

JAX takes a share of each GPU's memory for the buffers of programs when it starts: three quarters,
unless the environment says otherwise. The CUDA context and the buffers of NCCL lie in the rest.
geojax has its GPUs for itself, so that it takes more.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from geojax.accelerators import Accelerator
from geojax.errors import UserError
from geojax.quantities import quantity
from geojax.runtime.platform import PlatformName, platform_of_accelerator

FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables that set the share of JAX; the second is the older name of the first."""

DEFAULT_FRACTION = 0.9
"""Share that geojax lets JAX take."""

RESERVED_BYTES = 4 * 10**9
"""Bytes outside of any share: about half a gigabyte of CUDA context, and as much for each of the
communicators that NCCL makes for tensor, stage, data and dc."""


class UsableMemory(NamedTuple):
    """The memory of a device that a program may fill."""

    bytes: int
    """Its size."""
    of: str
    """The device and its memory, for a message: "an h100-sxm's 80 GB"."""


def take_memory_fraction(platform: PlatformName) -> None:
    """Let JAX take `DEFAULT_FRACTION` of each GPU's memory, unless the environment says otherwise.

    It has to be called before JAX starts its backend.
    """
    if platform == "gpu" and not any(os.environ.get(name) for name in FRACTION_VARIABLES):
        os.environ[FRACTION_VARIABLES[0]] = str(DEFAULT_FRACTION)


def usable_memory(accelerator: Accelerator, environment: Mapping[str, str]) -> UsableMemory | None:
    """Return the memory of an accelerator that a program may fill; None: nothing is known of it.

    Raises:
        UserError: the environment's share is not a number above 0 and up to 1.
    """
    memory = accelerator.memory_bytes
    if memory is None:
        return None
    usable = memory
    if platform_of_accelerator(accelerator).preallocates:
        usable = memory - RESERVED_BYTES
        if environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() != "platform":
            usable = min(usable, round(_fraction(environment) * memory))
    article = "an" if accelerator.name[0] in "aeh" else "a"
    return UsableMemory(usable, f"{article} {accelerator.name}'s {quantity(memory, 'B')}")


def _fraction(environment: Mapping[str, str]) -> float:
    name = next((name for name in FRACTION_VARIABLES if environment.get(name)), None)
    if name is None:
        return DEFAULT_FRACTION
    try:
        fraction = float(environment[name])
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise UserError(
            f"{name}={environment[name]}: it is the share of a GPU's memory that JAX takes; a "
            "number above 0 and up to 1 would be right"
        )
    return fraction
