"""Rotary positions (RoPE): rotation of queries and keys by angles proportional to positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from geojax.models.config import ModelConfig, RopeParameters


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """Return the radians per position of each pair of dims, float64 [rotary_dim / 2].

    RoFormer (Su et al. 2021), equation 15: rope_theta^(-2 i / rotary_dim); scaled as `rope_type`
    says (see `RopeParameters`).
    """
    rope = config.rope_parameters
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    frequencies = rope.rope_theta**-exponents
    if rope.rope_type == "linear":
        assert rope.factor is not None
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _scale_as_llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _scale_as_yarn(frequencies, rope, config.rotary_dim)
    return frequencies


def attention_factor(rope: RopeParameters) -> float:
    """Return the factor of rotated queries and keys: 1, or YaRN's (its equation 22)."""
    if rope.rope_type != "yarn":
        return 1.0
    assert rope.factor is not None
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is None or rope.mscale_all_dim is None:
        return _sharpening(rope.factor, 1.0)
    return _sharpening(rope.factor, rope.mscale) / _sharpening(rope.factor, rope.mscale_all_dim)


def score_scale(config: ModelConfig) -> float:
    """Return the factor of attention's scores, sharpened as DeepSeek's YaRN does.

    (`mscale_all_dim` sharpens all dims of a latent attention's head; the rotated ones alone are
    sharpened by their table.)
    """
    scale = 1.0 / math.sqrt(config.query_pre_attn_scalar)
    rope = config.rope_parameters
    if not config.has_latent_attention or rope.mscale_all_dim is None:
        return scale
    assert rope.factor is not None
    return scale * _sharpening(rope.factor, rope.mscale_all_dim) ** 2


def _sharpening(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1.0


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


def _scale_as_yarn(frequencies: np.ndarray, rope: RopeParameters, dim: int) -> np.ndarray:
    """Blend by the pair's number, as YaRN's code does, where its paper blends by the rotations."""
    context, factor = rope.original_max_position_embeddings, rope.factor
    assert context is not None
    assert factor is not None

    def pair_with(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first, last = pair_with(rope.beta_fast or 32.0), pair_with(rope.beta_slow or 1.0)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 1e-3
    blend = np.clip((np.arange(dim // 2) - first) / width, 0.0, 1.0)
    return frequencies * (1 - blend + blend / factor)


def rotary_table(
    positions: jax.Array, config: ModelConfig, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Compute cosines and sines for `positions` int32 [B, S], times YaRN's factor.

    Each is [B, S, 1, rotary_dim / 2], of `dtype` or float32, whichever is wider.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = jnp.asarray(rotary_frequencies(config), wide)
    angles = positions.astype(wide)[:, :, None, None] * frequencies
    factor = attention_factor(config.rope_parameters)
    if factor == 1:
        return jnp.cos(angles), jnp.sin(angles)
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


def rotate(
    x: jax.Array, table: tuple[jax.Array, jax.Array], *, interleaved: bool = False
) -> jax.Array:
    """Rotate the first 2 n dims of each head of `x` [B, S, N, D].

    n is the table's last dim; dim i makes a pair with dim i + n. If `interleaved`, dims 2 i and
    2 i + 1 are a pair, which comes out as dims i and i + n: scores do not depend on the order.
    """
    cosine, sine = table
    half = cosine.shape[-1]
    wide = x.astype(cosine.dtype)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = wide[..., 0 : 2 * half : 2], wide[..., 1 : 2 * half : 2]
    turned = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    ).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
