"""Rotary positions in `config.json`, in the layouts of transformers 4 and 5.

    transformers 4    rope_theta: 5e5, rope_scaling: {rope_type: llama3, factor: 8.0, ...} or null
    transformers 5    rope_parameters: {rope_type: llama3, rope_theta: 5e5, factor: 8.0, ...}

    by layer types    rope_parameters: {full_attention: {...}, sliding_attention: {...}}

Both read the former, and so does vLLM: it is what is written. There the base of layers with a
window is a key of its own, `rope_local_base_freq`.
"""

from collections.abc import Mapping
from typing import Any

from geojax.errors import UserError
from geojax.models.config import RopeParameters

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
"""Keys of `config.json` about rotary positions."""


def read_rope(
    content: Mapping[str, Any],
    theta: float,
    partial_rotary_factor: float,
    source: str,
    *,
    scaling: Mapping[str, Any] | None = None,
    by_layer_type: bool = False,
) -> dict[str, Any]:
    """Return the keys of `RopeParameters`, which may be ones that it refuses.

    Args:
        content: the whole `config.json`.
        theta: base of a file that does not tell it.
        partial_rotary_factor: share of a head that is rotated, likewise.
        source: the file's name for messages.
        scaling: that of a file that does not tell it; None: none.
        by_layer_type: they may be given by layer type; those of layers without a window are read.

    Raises:
        UserError: the scaling is no mapping, or of another kind for some layers.
    """
    scaling = content.get("rope_scaling") or content.get("rope_parameters") or scaling or {}
    if by_layer_type and "full_attention" in scaling:
        local = scaling.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise UserError(
                f"{source}: rope_type {local['rope_type']!r} in layers with a window is not "
                "carried; 'default' would be"
            )
        scaling = scaling["full_attention"]
    if not isinstance(scaling, Mapping) or any(isinstance(each, dict) for each in scaling.values()):
        raise UserError(f"{source}: rope_parameters must be one mapping for all layers")
    rope = {key: value for key, value in scaling.items() if value is not None}
    if (name := rope.pop("type", None)) is not None:
        rope.setdefault("rope_type", name)
    for key, default in (
        ("rope_theta", theta),
        ("partial_rotary_factor", partial_rotary_factor),
    ):
        given = content.get(key)
        rope.setdefault(key, default if given is None else given)
    return rope


def write_rope(rope: RopeParameters, *, scaled: bool = False) -> dict[str, Any]:
    """Return the keys of `config.json` about `rope`.

    `scaled`: transformers scales where the file does not tell, so that it has to tell of none too.
    """
    scaling = rope.model_dump(exclude={"rope_theta", "partial_rotary_factor"}, exclude_none=True)
    written = {
        "rope_theta": rope.rope_theta,
        "rope_scaling": scaling if scaled or rope.rope_type != "default" else None,
    }
    if rope.partial_rotary_factor != 1:
        written["partial_rotary_factor"] = rope.partial_rotary_factor
    return written
