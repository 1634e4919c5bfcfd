"""Limits of cuDNN's flash attention.

Nothing here needs a GPU to be traced, so a machine that has none can plan for one; to compile for
one it needs the CUDA libraries of `jax[cuda13]`.
"""

import jax.numpy as jnp

from geojax.models.attention.cudnn.primitives import libraries_version
from geojax.runtime.platform import compute_capability

# The version that jax's own test of the packed layout asks for.
_LEAST_VERSION_FOR_PACKING = 90600
_LEAST_VERSION_FOR_OTHER_VALUES = 91000
_NEWEST_VERSION = 92800
"""Taken for that of another machine, where this one has no libraries."""
_LARGEST_HEAD = 128
_LARGEST_HEAD_ON_HOPPER = 256


def unsupported_reason(
    dtype: jnp.dtype,
    head_dim: int,
    value_dim: int,
    *,
    packed: bool,
    softcap: bool,
    elsewhere: bool,
) -> str | None:
    """Say why cuDNN cannot compute attention for such inputs; None: it can.

    The checks of compute capability concern a GPU of this process. A program for another machine
    (`elsewhere`) is taken to be for a Hopper GPU or later, with today's libraries if this machine
    has none.
    """
    version = libraries_version()
    if version is None and elsewhere:
        version = _NEWEST_VERSION
    if version is None:
        return "the cuDNN libraries are not installed (pip install 'geojax-trainer[gpu]')"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16 and the inputs are {dtype}"
    if softcap:
        return "it does not cap scores (attn_logit_softcapping)"
    hopper = compute_capability() >= (9, 0)
    largest = _LARGEST_HEAD_ON_HOPPER if hopper else _LARGEST_HEAD
    if head_dim % 8 or head_dim > largest:
        return f"a head must be a multiple of 8 dims and at most {largest}, and it is {head_dim}"
    if value_dim != head_dim and (not hopper or version < _LEAST_VERSION_FOR_OTHER_VALUES):
        return (
            f"values of {value_dim} dims beside keys of {head_dim} need cuDNN 9.10 or later and "
            f"compute capability 9.0 (Hopper) or later, and this is cuDNN {version}"
        )
    if packed and not hopper:
        return "packed documents need compute capability 9.0 (Hopper) or later"
    if packed and version < _LEAST_VERSION_FOR_PACKING:
        return f"packed documents need cuDNN 9.6 or later, and this is {version}"
    return None
