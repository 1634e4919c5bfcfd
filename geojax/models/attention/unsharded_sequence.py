"""Attention of sequences that a device holds unsharded: each is one block of a kernel."""

import functools
from typing import Any

import jax

from geojax.models.attention.blocked.blocks import Block, Kernel
from geojax.models.parallel.varying import vary_over, varying_axes


def unsharded_sequence_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    *,
    kernel: Kernel,
) -> jax.Array:
    """Compute causal attention without the score matrix; shapes as in `attention`."""
    axes = varying_axes(query, key, value, segment_ids)
    operands = vary_over((query, key, value, segment_ids), axes)
    return _unsharded_sequence_attention(*operands, scale, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _unsharded_sequence_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    kernel: Kernel,
) -> jax.Array:
    return _forward(query, key, value, segment_ids, scale, kernel)[0]


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    kernel: Kernel,
) -> tuple[jax.Array, tuple[Any, ...]]:
    block = Block(query, key, value, segment_ids, segment_ids, causal=True)
    result = kernel.forward(block, scale)
    output = result.output.astype(query.dtype)
    return output, (query, key, value, segment_ids, output, result.log_sum_exp)


def _backward(
    scale: float, kernel: Kernel, residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, segment_ids, output, log_sum_exp = residuals
    block = Block(query, key, value, segment_ids, segment_ids, causal=True)
    gradients = kernel.backward(block, scale, output, log_sum_exp, gradient)
    d_query, d_key, d_value = (x.astype(query.dtype) for x in gradients)
    return d_query, d_key, d_value, None


_unsharded_sequence_attention.defvjp(_forward, _backward)
