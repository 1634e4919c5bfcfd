"""Layer normalization and its variants, computed in at least float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from geojax.models.config import ModelConfig
from geojax.models.declaration import constant, parameter


class Norm(nnx.Module):
    """A norm of the last dim.

    LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019), whose stored scale may be the
    scale minus 1 (Nemotron-4, Gemma); by `config.norm`.

    Args:
        size: the dim's.
        config: the model.
        eps: number added before the root is taken; None: `config.rms_norm_eps`.
        of_heads: True if ranks of `tensor` apply it to their own heads alone.
        has_bias: True if numbers are shifted after it; None: as the model's norms of the stream.
    """

    def __init__(
        self,
        size: int,
        config: ModelConfig,
        *,
        eps: float | None = None,
        of_heads: bool = False,
        has_bias: bool | None = None,
    ):
        self.eps = config.rms_norm_eps if eps is None else eps
        self.is_centered = config.norm.startswith("layernorm")
        self.is_stored_minus_1 = config.norm.endswith("1p")
        scale = constant(0.0 if self.is_stored_minus_1 else 1.0)
        self.scale = parameter((size,), scale, in_parts=of_heads)
        if self.is_centered if has_bias is None else has_bias:
            self.bias = parameter((size,), constant(0.0), in_parts=of_heads)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize `x` [..., H], or heads [..., D], over its last dim, in `x.dtype`."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scale = self.scale.get_value().astype(wide.dtype)
        if self.is_centered:
            wide = wide - wide.mean(-1, keepdims=True)
        if self.is_stored_minus_1:
            scale = 1 + scale
        inverse = lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps)
        result = wide * inverse * scale
        if hasattr(self, "bias"):
            result = result + self.bias.get_value().astype(wide.dtype)
        return result.astype(x.dtype)
