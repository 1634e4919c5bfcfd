"""Plain softmax attention: the definition that the other implementations are tested against."""

import jax
import jax.numpy as jnp


def reference_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
) -> jax.Array:
    """Compute causal softmax(scale * Q K^T) V with the whole score matrix in memory.

    Shapes as in `geojax.models.attention.attention`. For tests and tiny sizes: its memory grows
    with the square of the sequence.
    """
    rows, length, heads, head_dim = query.shape
    groups = key.shape[2]
    compute = jnp.promote_types(query.dtype, jnp.float32)
    query = query.reshape(rows, length, groups, heads // groups, head_dim)
    scores = scale * jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=compute)
    position = jnp.arange(length)
    allowed = position[:, None] >= position[None, :]
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)
    output = jnp.einsum("bkgts,bskd->btkgd", weights, value, preferred_element_type=compute)
    return output.reshape(rows, length, heads, head_dim).astype(value.dtype)
