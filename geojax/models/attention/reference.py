"""Plain softmax attention: the definition that the other implementations are tested against."""

import jax
import jax.numpy as jnp

from geojax.models.attention.operands import Operands, ScoreRule


def reference_attention(operands: Operands, rule: ScoreRule) -> jax.Array:
    """Compute causal softmax(scale * Q K^T) V with the whole score matrix in memory.

    Shapes as in `geojax.models.attention.attention`. For tests and tiny sizes: its memory grows
    with the square of the sequence.
    """
    query, key, value, segment_ids, sinks, is_windowed = operands
    rows, length, heads, head_dim = query.shape
    groups = key.shape[2]
    compute = jnp.promote_types(query.dtype, jnp.float32)
    query = query.reshape(rows, length, groups, heads // groups, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=compute)
    scores = rule.scale * scores
    if rule.softcap is not None:
        scores = rule.softcap * jnp.tanh(scores / rule.softcap)
    position = jnp.arange(length)
    distance = position[:, None] - position[None, :]
    allowed = distance >= 0
    if rule.window is not None:
        near = distance < rule.window
        allowed = allowed & (near if is_windowed is None else near | ~is_windowed)
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None, None]
    scores = jnp.where(allowed, scores, -jnp.inf)
    if sinks is not None:
        of_heads = sinks.astype(compute).reshape(groups, -1, 1, 1)
        of_queries = jnp.broadcast_to(of_heads, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, of_queries], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    output = jnp.einsum("bkgts,bskd->btkgd", weights, value, preferred_element_type=compute)
    return output.reshape(rows, length, heads, -1).astype(value.dtype)
