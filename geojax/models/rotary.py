"""Rotary positions (RoPE): rotation of queries and keys by angles proportional to positions."""

import jax
import jax.numpy as jnp
import numpy as np

from geojax.models.config import ModelConfig, RopeParameters


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Return the radians per position of each pair of dims, float64 [rotary_dim / 2].

    RoFormer (Su et al. 2021), equation 15: rope_theta^(-2 i / rotary_dim); scaled as Llama 3.1 does
    with `rope_type: llama3`.
    """
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    frequencies = config.rope_parameters.rope_theta**-exponents
    if config.rope_parameters.rope_type == "llama3":
        return _scale_as_llama3(frequencies, config.rope_parameters)
    return frequencies


def _scale_as_llama3(frequencies: np.ndarray, rope: RopeParameters) -> np.ndarray:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    context, factor = rope.original_max_position_embeddings, rope.factor
    assert low is not None
    assert high is not None
    assert context is not None
    assert factor is not None
    rotations = context * frequencies / (2 * np.pi)
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / factor)


def rotary_table(
    positions: jax.Array, config: ModelConfig, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Compute cosines and sines for `positions` int32 [B, S].

    Each is [B, S, 1, rotary_dim / 2], of `dtype` or float32, whichever is wider.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = jnp.asarray(rotary_frequencies(config), wide)
    angles = positions.astype(wide)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first 2 n dims of each head of `x` [B, S, N, D].

    n is the table's last dim; dim i makes a pair with dim i + n.
    """
    cosine, sine = table
    half = cosine.shape[-1]
    wide = x.astype(cosine.dtype)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    turned = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    ).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
