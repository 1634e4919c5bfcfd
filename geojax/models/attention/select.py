"""Choice of the implementation of attention."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.errors import UserError
from geojax.mesh import GPU_PLATFORMS
from geojax.models.attention.cudnn import support as cudnn
from geojax.runtime.platform import target_platform

IMPLEMENTATIONS = ("auto", "blocked", "cudnn", "reference")
"""Names of implementations. auto: cuDNN where it can run, else blocked. blocked: plain JAX,
anywhere, memory linear in the sequence. cudnn: flash attention on NVIDIA GPUs. reference: plain
softmax, for tests."""


class AttentionChoice(NamedTuple):
    """An implementation and the reason for its choice, in one line."""

    name: str
    reason: str


def chosen_implementation(
    dtype: Any,
    head_dim: int,
    *,
    value_dim: int | None = None,
    packed: bool,
    softcap: bool = False,
    implementation: str = "auto",
    platform: str | None = None,
) -> AttentionChoice:
    """Choose the implementation that `attention` uses for such inputs.

    Args:
        dtype: dtype of query, key and value.
        head_dim: width of a head.
        value_dim: width of its value; None: `head_dim`.
        packed: segment ids are given.
        softcap: scores are capped.
        implementation: the requested one of `IMPLEMENTATIONS`.
        platform: platform that the program is compiled for; None: `target_platform`.

    Raises:
        UserError: the implementation is unknown, or is cudnn and cannot run.
    """
    if implementation not in IMPLEMENTATIONS:
        raise UserError(
            f"attention: no implementation is called '{implementation}'; there are: "
            f"{', '.join(IMPLEMENTATIONS)}"
        )
    if implementation not in ("auto", "cudnn"):
        return AttentionChoice(implementation, f"attention: {implementation}, as asked")
    platform = platform or target_platform().name
    reason = cudnn.unsupported_reason(
        jnp.dtype(dtype),
        head_dim,
        value_dim or head_dim,
        packed=packed,
        softcap=softcap,
        elsewhere=platform in GPU_PLATFORMS and jax.default_backend() not in GPU_PLATFORMS,
    )
    if implementation == "cudnn":
        if reason:
            raise UserError(f"attention: cudnn cannot be used, {reason}; use blocked or auto")
        return AttentionChoice("cudnn", "attention: cudnn, as asked")
    if platform not in GPU_PLATFORMS:
        return AttentionChoice("blocked", f"attention: blocked, for platform {platform}")
    if reason:
        return AttentionChoice("blocked", f"attention: blocked, since {reason}")
    return AttentionChoice("cudnn", "attention: cudnn flash attention")
