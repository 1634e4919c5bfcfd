"""Attention as every model calls it, and its derivative.

A sequence that a device holds unsharded is one block of a kernel. Sequences that are sharded over
`context` go to `geojax.models.attention.context`.

Shapes: B batch, S sequence, N heads, K kv heads, D dims of a query or key, W dims of a value.
"""

import functools
import math
from typing import Any

import jax

from geojax.collectives.axes import vary_over, varying_axes
from geojax.errors import UserError
from geojax.models.attention.blocked import TILED
from geojax.models.attention.blocks import Kernel, ScoreBlock, join_sinks, sinks_gradient
from geojax.models.attention.context.methods import context_attention
from geojax.models.attention.context.ulysses import Attention
from geojax.models.attention.cudnn.kernel import CUDNN
from geojax.models.attention.operands import Operands, ScoreRule
from geojax.models.attention.reference import reference_attention
from geojax.models.attention.select import chosen_implementation
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism

_KERNELS: dict[str, Kernel] = {"blocked": TILED, "cudnn": CUDNN}


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    implementation: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    is_windowed: jax.Array | None = None,
    sinks: jax.Array | None = None,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> jax.Array:
    """Compute causal softmax(scale * Q K^T) V inside each packed document.

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D]; N must be a multiple of K (grouped queries, Ainslie et al. 2023): query
            head n reads key head n // (N / K).
        value: [B, S, K, W].
        segment_ids: int32 [B, S], or None where each sequence is one document. A position attends
            only to positions with its own number; a document is one run of equal numbers. Padding
            is a document like any other, so its outputs are finite.
        implementation: one of `IMPLEMENTATIONS`.
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap: bound of the scores, which become softcap * tanh(score / softcap); None: none.
        window: keys that a query sees, its own position's and those right before; None: all.
        is_windowed: bool [], true where the window applies, for layers that one program computes;
            None: it does.
        sinks: [N], scores of a key without a value that every query sees besides; None: none.
        parallelism: how the sequence is sharded. With a `context` of several ranks S is this rank's
            share of it, in the order of `geojax.models.parallel.sequence_order`.

    Returns:
        [B, S, N, W] in the dtype of the inputs; scores, softmax and sums are in at least float32.

    Raises:
        UserError: unknown implementation, one that cannot run here, or shapes that do not fit.
    """
    _check(query, key, value, segment_ids)
    choice = chosen_implementation(
        query.dtype,
        query.shape[-1],
        value_dim=value.shape[-1],
        packed=segment_ids is not None,
        softcap=softcap is not None,
        implementation=implementation,
    )
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if window is not None and window >= query.shape[1] * parallelism.context:
        window = None
    if window is None:
        is_windowed = None
    operands = Operands(query, key, value, segment_ids, sinks, is_windowed)
    rule = ScoreRule(scale, softcap, window)
    kernel = _KERNELS.get(choice.name)
    unsharded_sequence: Attention = reference_attention
    if kernel is not None:
        unsharded_sequence = functools.partial(unsharded_sequence_attention, kernel=kernel)
    if parallelism.context == 1:
        return unsharded_sequence(operands, rule)
    return context_attention(
        operands, rule, parallelism, unsharded_sequence=unsharded_sequence, kernel=kernel
    )


def _check(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None
) -> None:
    if not query.ndim == key.ndim == value.ndim == 4 or key.shape[:3] != value.shape[:3]:
        raise UserError(
            f"attention: query {query.shape}, key {key.shape} and value {value.shape} must be "
            "[B, S, N, D], [B, S, K, D] and [B, S, K, W]"
        )
    if (*query.shape[:2], query.shape[3]) != (*key.shape[:2], key.shape[3]):
        raise UserError(
            f"attention: query {query.shape} and key {key.shape} must agree in all but the heads"
        )
    if query.shape[2] % key.shape[2]:
        raise UserError(
            f"attention: {query.shape[2]} query heads are no multiple of {key.shape[2]} key heads"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise UserError(
            f"attention: query, key and value must have one dtype, not {query.dtype}, {key.dtype} "
            f"and {value.dtype}"
        )
    if segment_ids is not None and segment_ids.shape != query.shape[:2]:
        raise UserError(
            f"attention: segment_ids {segment_ids.shape} must be [B, S] = {query.shape[:2]}"
        )


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


def _block(operands: Operands) -> ScoreBlock:
    query, key, value, segment_ids, _, is_windowed = operands
    return ScoreBlock(
        query, key, value, segment_ids, segment_ids, causal=True, is_windowed=is_windowed
    )
