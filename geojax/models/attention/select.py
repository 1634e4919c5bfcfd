"""Which implementation of attention runs where, and why."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from geojax.errors import UserError
from geojax.mesh import GPU_PLATFORMS
from geojax.models.attention.cudnn import support as cudnn
from geojax.runtime.platform import target_platform

IMPLEMENTATIONS = ("auto", "blocked", "cudnn", "reference")
"""auto: cuDNN where it can, else blocked. blocked: plain JAX, memory linear in the sequence,
anywhere. cudnn: flash attention on NVIDIA GPUs. reference: plain softmax, for tests."""


class Choice(NamedTuple):
    """An implementation, and one line that says why it was chosen."""

    name: str
    reason: str


def chosen_implementation(
    dtype: Any,
    head_size: int,
    *,
    packed: bool,
    implementation: str = "auto",
    platform: str | None = None,
) -> Choice:
    """What `attention` will use for such inputs.

    Args:
        dtype: of query, key and value.
        head_size: width of a head.
        packed: whether segment ids are given.
        implementation: what the caller asks for, one of `IMPLEMENTATIONS`.
        platform: what the program is compiled for; None: `target_platform`.

    Raises:
        UserError: the implementation is unknown, or is cudnn and cannot run.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"attention: no implementation is called '{implementation}'; there are: "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    if implementation not in ("auto", "cudnn"):
        return Choice(implementation, f"attention: {implementation}, as asked")
    reason = cudnn.unsupported_reason(jnp.dtype(dtype), head_size, packed=packed)
    if implementation == "cudnn":
        if reason:
            raise UserError(f"attention: cudnn cannot be used, {reason}; use blocked or auto")
        return Choice("cudnn", "attention: cudnn, as asked")
    platform = platform or target_platform().name
    if platform not in GPU_PLATFORMS:
        return Choice("blocked", f"attention: blocked, for platform {platform}")
    if reason:
        return Choice("blocked", f"attention: blocked, since {reason}")
    return Choice("cudnn", "attention: cudnn flash attention")
