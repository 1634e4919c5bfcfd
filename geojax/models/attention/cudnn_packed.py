"""cuDNN's flash attention for packed documents, by sequence offsets: no mask, no bias.

cuDNN takes the packed rows as many short sequences: where each begins and how long it is. JAX has
no public function for that layout, so this module binds JAX's own (private) primitives; their
names and parameters are the same in JAX 0.10 and 0.11, and a test checks that.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as binding

from geojax.models.attention.blocked import blocked_attention
from geojax.models.varying import vary_over, varying_axes

MOST_SEGMENTS = 32
"""Segments of one row that cuDNN is compiled for. It saves one float per segment, head and
position: 128 bytes beside the kilobyte of query, key, value and output of a head of 128 dims. A
batch in which some row has more segments is computed by the blocked implementation."""

# JAX 0.10 takes the query's heads for the key's when it turns positions into offsets.
_NEEDS_ALL_HEADS = jax.__version_info__ < (0, 11)


def libraries_version() -> int | None:
    """The version of the cuDNN that JAX has, 90600 for 9.6.0; None if it has none."""
    try:
        return int(binding.check_cudnn_version())
    except RuntimeError:
        return None


def packed_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, scale: float
) -> jax.Array:
    """Attention inside each run of equal `segment_ids`; shapes as in `attention`."""
    if _NEEDS_ALL_HEADS:
        repeats = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    return _packed_attention(query, key, value, segment_ids, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _packed_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, scale: float
) -> jax.Array:
    return _forward(query, key, value, segment_ids, scale)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, scale: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    rows, length, heads, _ = query.shape

    def by_cudnn() -> tuple[jax.Array, jax.Array]:
        output, statistics = binding._dot_product_attention_fwd_p_wrapper.bind(
            *_operands(query, key, value, segment_ids), is_training=True, **_parameters(scale)
        )
        return output, statistics

    def by_blocks() -> tuple[jax.Array, jax.Array]:
        unused = jnp.zeros((rows * MOST_SEGMENTS, heads, length), jnp.float32)
        output = blocked_attention(query, key, value, segment_ids, scale)
        return output, vary_over(unused, varying_axes(output))

    output, statistics = lax.cond(_few_segments(segment_ids), by_cudnn, by_blocks)
    return output, (query, key, value, segment_ids, output, statistics)


def _backward(
    scale: float, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, segment_ids, output, statistics = residuals

    def by_cudnn() -> tuple[jax.Array, ...]:
        gradients = binding._dot_product_attention_bwd_p_wrapper.bind(
            *_operands(query, key, value, segment_ids),
            statistics,
            output,
            gradient,
            **_parameters(scale),
        )
        return tuple(gradients)

    def by_blocks() -> tuple[jax.Array, ...]:
        # Such batches are rare: to compute the forward pass again costs less than to keep its
        # residuals beside cuDNN's in every step.
        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return blocked_attention(query, key, value, segment_ids, scale)

        return jax.vjp(attend, query, key, value)[1](gradient)

    d_query, d_key, d_value = lax.cond(_few_segments(segment_ids), by_cudnn, by_blocks)
    return d_query, d_key, d_value, None


_packed_attention.defvjp(_forward, _backward)


def segment_layout(segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Where the runs of equal numbers in each row begin, and how long they are.

    Args:
        segment_ids: int32 [B, T].
        most: how many runs of a row are looked at.

    Returns:
        starts int32 [B, most + 1] and lengths int32 [B, most], -1 where there are no more runs (the
        last start is always -1).
    """
    length = segment_ids.shape[1]

    def of_row(begins: jax.Array) -> tuple[jax.Array, jax.Array]:
        (starts,) = jnp.nonzero(begins, size=most + 1, fill_value=length)
        lengths = jnp.diff(starts)
        starts = jnp.where(lengths > 0, starts[:-1], -1)
        return jnp.append(starts, -1), jnp.where(lengths > 0, lengths, -1)

    starts, lengths = jax.vmap(of_row)(_begins(segment_ids))
    return starts.astype(jnp.int32), lengths.astype(jnp.int32)


def _begins(segment_ids: jax.Array) -> jax.Array:
    first = jnp.ones_like(segment_ids[:, :1], bool)
    return jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)


def _few_segments(segment_ids: jax.Array) -> jax.Array:
    return jnp.all(jnp.sum(_begins(segment_ids), axis=1) <= MOST_SEGMENTS)


def _operands(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, ...]:
    """Query, key, value, bias, lengths and offsets of queries and of keys, two page tables."""
    starts, lengths = segment_layout(segment_ids, MOST_SEGMENTS)
    unused = jnp.zeros(0, query.dtype)
    return query, key, value, unused, lengths, lengths, starts, starts, unused, unused


def _parameters(scale: float) -> dict[str, Any]:
    return {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": binding.MaskType.PADDING_CAUSAL,
        "layout": binding.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
