"""Attention of sequences that a device holds unsharded: each is one block of a kernel."""

import functools
from typing import Any

import jax

from geojax.models.attention.blocked.blocks import Block, Kernel
from geojax.models.attention.operands import Operands, ScoreRule
from geojax.models.attention.sinks import join_sinks, sinks_gradient
from geojax.models.parallel.varying import vary_over, varying_axes


def unsharded_sequence_attention(
    operands: Operands, rule: ScoreRule, *, kernel: Kernel
) -> jax.Array:
    """Compute causal attention without the score matrix; shapes as in `attention`."""
    varying = vary_over(operands, varying_axes(operands))
    return _unsharded_sequence_attention(varying, rule, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _unsharded_sequence_attention(operands: Operands, rule: ScoreRule, kernel: Kernel) -> jax.Array:
    return _forward(operands, rule, kernel)[0]


def _forward(
    operands: Operands, rule: ScoreRule, kernel: Kernel
) -> tuple[jax.Array, tuple[Any, ...]]:
    result = join_sinks(kernel.forward(_block(operands), rule), operands.sinks)
    output = result.output.astype(operands.query.dtype)
    return output, (operands, output, result.log_sum_exp)


def _backward(
    rule: ScoreRule, kernel: Kernel, residuals: tuple[Any, ...], gradient: jax.Array
) -> tuple[Operands]:
    operands, output, log_sum_exp = residuals
    gradients = kernel.backward(_block(operands), rule, output, log_sum_exp, gradient)
    d_query, d_key, d_value = (x.astype(operands.query.dtype) for x in gradients)
    d_sinks = sinks_gradient(operands.sinks, output, log_sum_exp, gradient)
    return (Operands(d_query, d_key, d_value, sinks=d_sinks),)


_unsharded_sequence_attention.defvjp(_forward, _backward)


def _block(operands: Operands) -> Block:
    query, key, value, segment_ids, _, is_windowed = operands
    return Block(query, key, value, segment_ids, segment_ids, causal=True, is_windowed=is_windowed)
