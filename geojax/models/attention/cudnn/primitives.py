"""cuDNN's flash attention as JAX binds it, with the log-sum-exp that JAX keeps to itself.

`jax.nn.dot_product_attention` does not take sequences that begin inside a row, and its backward
pass cannot be given a log-sum-exp over more keys than its own. So this module binds JAX's own
(private) primitives; their names are the same in JAX 0.10 to 0.12, their parameters those of 0.10
and from 0.12 on one more. A test checks that.
"""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as binding

from geojax.models.attention.operands import ScoreRule

CAUSAL = binding.MaskType.CAUSAL
NO_MASK = binding.MaskType.NO_MASK
PADDING = binding.MaskType.PADDING
PADDING_CAUSAL = binding.MaskType.PADDING_CAUSAL

# JAX 0.12 can call a function on every score.
_NO_SCORE_FUNCTION = {
    name: None
    for name in inspect.signature(binding._dot_product_attention_fwd_impl).parameters
    if name == "score_mod"
}


class Sequences(NamedTuple):
    """Positions of the B sequences of query and key that count, int32.

    Either one run a sequence, which begins at position 0: lengths [B] and no starts. Or up to M of
    them: lengths [B, M] and starts [B, M + 1], -1 where there are no more.
    """

    query_lengths: jax.Array
    key_lengths: jax.Array
    query_starts: jax.Array | None = None
    key_starts: jax.Array | None = None


def backward_workspace_bytes(
    query_shape: tuple[int, ...], value_shape: tuple[int, ...], capacity: int
) -> int:
    """Return the bytes that cuDNN's backward needs beside operands and results.

    It keeps the gradient of the query in float32, and with fewer key heads those of keys and values
    for all heads in 16 bits: with room for a whole sequence in each of the capacity's. On an H200
    cuDNN 9 asked for as much in 24 cases. A compile without a GPU does not know of it. The forward
    needs next to nothing.

    Args:
        query_shape: [B, S, N, D].
        value_shape: [B, S, K, W].
        capacity: sequences that a row may hold.
    """
    rows, length, heads, dims = query_shape
    key_heads, value_dims = value_shape[2:]
    of_head = 4 * dims + 4  # and a sum
    if key_heads < heads:
        of_head += 2 * (dims + value_dims)
    return rows * capacity * length * heads * of_head


def libraries_version() -> int | None:
    """Return the version of JAX's cuDNN, 90600 for 9.6.0; None if it has none."""
    try:
        return int(binding.check_cudnn_version())
    except RuntimeError:
        return None


def flash_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequences: Sequences | None,
    mask: binding.MaskType,
    rule: ScoreRule,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention where the position counts; elsewhere the result is undefined.

    Args:
        query: [B, q, N, D].
        key: [B, k, K, D].
        value: [B, k, K, D].
        sequences: for the masks PADDING and PADDING_CAUSAL.
        mask: one of this module's; the causal ones begin at the start of each sequence.
        rule: of the scores; a window goes with the causal masks, a cap with none.

    Returns:
        Output [B, q, N, D] and log-sum-exp: float32 [B, N, q], or [B M, N, q] with
        several runs a sequence: there all runs of all sequences follow each other without gaps.
    """
    output, log_sum_exp = binding._dot_product_attention_fwd_p_wrapper.bind(
        *_operands(query, key, value, sequences), is_training=True, **parameters(mask, rule)
    )
    return output, log_sum_exp


def flash_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequences: Sequences | None,
    mask: binding.MaskType,
    rule: ScoreRule,
    output: jax.Array,
    log_sum_exp: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of query, key and value where the position counts; else undefined.

    `output` and `log_sum_exp` may be those over more keys than these: then the gradients are the
    contribution of these keys.
    """
    operands = _operands(query, key, value, sequences)
    d_query, d_key, d_value = binding._dot_product_attention_bwd_p_wrapper.bind(
        *operands, log_sum_exp, output, gradient, **parameters(mask, rule)
    )
    return d_query, d_key, d_value


def parameters(mask: binding.MaskType, rule: ScoreRule) -> dict[str, Any]:
    """Return the static parameters of both primitives."""
    return {
        "scale": rule.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": binding.AttentionLayout.BTNH.value,
        "sliding_window_length": rule.window,
        **_NO_SCORE_FUNCTION,
    }


def _operands(
    query: jax.Array, key: jax.Array, value: jax.Array, sequences: Sequences | None
) -> tuple[jax.Array, ...]:
    """Return query, key, value, bias, lengths and starts of queries and keys, two page tables."""
    unused = jnp.zeros(0, query.dtype)
    given = Sequences(unused, unused) if sequences is None else sequences
    arguments = (unused if x is None else x for x in given)
    return query, key, value, unused, *arguments, unused, unused
