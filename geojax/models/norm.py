"""Layer normalization and its variants, computed in at least float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters, constant, parameter


class Norm(nnx.Module):
    """A norm of the last dim.

    Args:
        size: the dim's.
        config: the model.
        of_heads: True if ranks of `tensor` apply it to their own heads alone.
        has_bias: True if numbers are shifted after it; None: as the model's norms of the stream.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        *,
        of_heads: bool = False,
        has_bias: bool | None = None,
    ):
        is_stored_minus_1 = config.norm.endswith("1p")
        scale = constant(0.0 if is_stored_minus_1 else 1.0)
        self.scale = parameter((size,), scale, in_parts=of_heads)
        if config.norm.startswith("layernorm") if has_bias is None else has_bias:
            self.bias = parameter((size,), constant(0.0), in_parts=of_heads)


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
