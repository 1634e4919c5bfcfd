"""Layer normalization and its variants, computed in at least float32."""

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.config import ModelConfig
from geojax.models.parameters import Parameters


def norm(
    parameters: Parameters, x: jax.Array, config: ModelConfig, eps: float | None = None
) -> jax.Array:
    """Normalize `x` [..., H], or heads [..., D], over its last dim, in `x.dtype`.

    LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), whose stored scale may be the
    scale minus 1 (Nemotron-4, Gemma); by `config.norm`.

    Args:
        parameters: scale [H], or [D], and bias.
        x: the numbers.
        config: the model.
        eps: number added before the root is taken; None: `config.rms_norm_eps`.
    """
    eps = config.rms_norm_eps if eps is None else eps
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = parameters["scale"].astype(wide.dtype)
    if config.norm.startswith("layernorm"):
        wide = wide - wide.mean(-1, keepdims=True)
    if config.norm.endswith("1p"):
        scale = 1 + scale
    inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    result = wide * inverse * scale
    if "bias" in parameters:
        result = result + parameters["bias"].astype(wide.dtype)
    return result.astype(x.dtype)
