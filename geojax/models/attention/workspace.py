"""Memory that attention takes beside its operands and results."""

from typing import Any

from geojax.models.attention.cudnn import packed
from geojax.models.attention.select import chosen_implementation


def workspace_bytes(
    dtype: Any,
    query_shape: tuple[int, ...],
    value_shape: tuple[int, ...],
    *,
    softcap: bool,
    platform: str,
) -> int:
    """Return what the kernel of `platform` needs in the backward; 0 for attention in plain JAX.

    A compile without a GPU does not count it, and plain JAX is counted where it is traced.

    Args:
        dtype: dtype of query, key and value.
        query_shape: [B, S, N, D] on a device.
        value_shape: [B, S, K, W].
        softcap: scores are capped.
        platform: platform that the program is for.
    """
    choice = chosen_implementation(
        dtype,
        query_shape[-1],
        value_dim=value_shape[-1],
        packed=True,
        softcap=softcap,
        platform=platform,
    )
    return packed.workspace_bytes(query_shape, value_shape) if choice.name == "cudnn" else 0
