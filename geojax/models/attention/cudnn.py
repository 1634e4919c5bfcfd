"""cuDNN's flash attention: what it can do, and the call without packing.

Nothing here needs a GPU to be traced, so a machine that has none can compile for one; it needs the
CUDA libraries of `jax[cuda13]`.
"""

import jax
import jax.numpy as jnp

from geojax.models.attention.cudnn_packed import libraries_version, packed_attention
from geojax.models.varying import vary_over, varying_axes

# The version that jax's own test of the packed layout asks for.
_LEAST_VERSION_FOR_PACKING = 90600
_LARGEST_HEAD = 128
_LARGEST_HEAD_ON_HOPPER = 256


def obstacle(dtype: jnp.dtype, head_size: int, *, packed: bool) -> str | None:
    """Why cuDNN cannot compute attention for such inputs, or None if it can.

    The checks of compute capability concern a GPU of this process; a program that is compiled for
    another machine is taken to be for a Hopper GPU or later.
    """
    version = libraries_version()
    if version is None:
        return "the cuDNN libraries are not installed (pip install 'geojax[gpu]')"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 and float16 and the inputs are {dtype}"
    hopper = _capability() >= (9, 0)
    largest = _LARGEST_HEAD_ON_HOPPER if hopper else _LARGEST_HEAD
    if head_size % 8 or head_size > largest:
        return f"a head must be a multiple of 8 dims and at most {largest}, and it is {head_size}"
    if packed and not hopper:
        return "packed documents need compute capability 9.0 (Hopper) or later"
    if packed and version < _LEAST_VERSION_FOR_PACKING:
        return f"packed documents need cuDNN 9.6 or later, and this is {version}"
    return None


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
) -> jax.Array:
    """Causal attention by cuDNN; shapes as in `attention`. Ask `obstacle` before."""
    if segment_ids is None:
        result: jax.Array = jax.nn.dot_product_attention(
            query, key, value, scale=scale, is_causal=True, implementation="cudnn"
        )
        return result
    axes = varying_axes(query, key, value, segment_ids)
    query, key, value, segment_ids = vary_over((query, key, value, segment_ids), axes)
    return packed_attention(query, key, value, segment_ids, scale)


def _capability() -> tuple[int, ...]:
    if jax.default_backend() != "gpu":
        return (9, 0)
    return tuple(int(part) for part in jax.local_devices()[0].compute_capability.split("."))
