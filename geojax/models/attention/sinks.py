"""Attention sinks: a learned score of each head that takes part in the softmax and has no value.

A sink is one more key, whose value is zero, so it is joined to the attention to all other keys as
one more block: their weights shrink by exp(log_sum_exp - total). The gradients of the other keys
need no change, once the log-sum-exp includes the sink.

Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), section 2.2; G. Xiao et
al., "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453).
"""

import jax
import jax.numpy as jnp

from geojax.models.attention.blocked.blocks import Partial
from geojax.models.attention.blocked.tiles import row_delta


def join_sinks(part: Partial, sinks: jax.Array | None) -> Partial:
    """Add the sinks [N] (None: there are none) to the attention to all keys."""
    if sinks is None:
        return part
    total = jnp.logaddexp(part.log_sum_exp, sinks[:, None].astype(part.log_sum_exp.dtype))
    return Partial(part.output * jnp.exp(part.log_sum_exp - total), total)


def sinks_gradient(
    sinks: jax.Array | None, output: jax.Array, log_sum_exp: jax.Array, gradient: jax.Array
) -> jax.Array | None:
    """Compute the gradient of the sinks [N]; None where there are none.

    Args:
        sinks: as in `join_sinks`.
        output: [B, S, N, D], over all keys and the sink.
        log_sum_exp: [B, S, N, 1], likewise.
        gradient: [B, S, N, D], of that output.
    """
    if sinks is None:
        return None
    weights = jnp.exp(sinks[:, None].astype(log_sum_exp.dtype) - log_sum_exp)
    return -jnp.sum(weights * row_delta(gradient, output), axis=(0, 1, 3)).astype(sinks.dtype)
