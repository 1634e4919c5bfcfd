"""The one seam through which every model calls attention, and the choice of what computes it."""

import math

import jax

from geojax.errors import UserError
from geojax.models.attention.blocked import blocked_attention
from geojax.models.attention.reference import reference_attention

IMPLEMENTATIONS = ("auto", "blocked", "reference")


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    implementation: str = "auto",
    scale: float | None = None,
) -> jax.Array:
    """Causal softmax(scale * Q K^T) V, inside each packed document.

    Args:
        query: [B, T, H, D].
        key: [B, T, K, D]; H must be a multiple of K (grouped queries), and query head h reads
            key head h // (H / K).
        value: [B, T, K, D].
        segment_ids: int32 [B, T] or None. A position attends to positions with its own number
            only. Padding is a segment like any other (number 0).
        implementation: one of `IMPLEMENTATIONS`.
        scale: factor of the scores; 1 / sqrt(D) when None.

    Returns:
        [B, T, H, D] in the dtype of the inputs.

    Raises:
        UserError: unknown implementation, or shapes that do not fit.
    """
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if implementation == "reference":
        return reference_attention(query, key, value, segment_ids, scale)
    if implementation in ("auto", "blocked"):
        return blocked_attention(query, key, value, segment_ids, scale)
    raise UserError(
        f"attention: unknown implementation '{implementation}'; there are: "
        f"{', '.join(IMPLEMENTATIONS)}"
    )
