"""Layer normalization and its variants, computed in at least float32."""

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.config import ModelConfig
from geojax.models.parameters import Parameters


def norm(parameters: Parameters, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Normalize `x` [..., H], or heads [..., D], over its last dim, in `x.dtype`.

    LayerNorm (Ba et al. 2016), RMSNorm (Zhang and Sennrich 2019), or LayerNorm1p (Nemotron-4),
    whose stored scale is the scale minus 1; by `config.norm`.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = parameters["scale"].astype(wide.dtype)
    if config.norm != "rmsnorm":
        wide = wide - wide.mean(-1, keepdims=True)
    if config.norm == "layernorm1p":
        scale = 1 + scale
    inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.rms_norm_eps)
    result = wide * inverse * scale
    if "bias" in parameters:
        result = result + parameters["bias"].astype(wide.dtype)
    return result.astype(x.dtype)
