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
from geojax.json_file import shown
from geojax.models.config import RopeParameters

_NEEDING_ORIGINAL = ("llama3", "yarn")
"""Scalings by the length of the training before; in a file that does not tell, it is the longest
sequence, as in transformers."""

_NOTES = ("finetuned",)
"""Keys of a scaling that nothing reads."""

ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"})
"""Keys of `config.json` about rotary positions."""


def read_rope(
    content: Mapping[str, Any],
    theta: float,
    partial_rotary_factor: float | None,
    source: str,
    *,
    positions: int,
    scaling: Mapping[str, Any] | None = None,
    by_layer_type: bool = False,
) -> dict[str, Any]:
    """Return the keys of `RopeParameters`, which may be ones that it refuses.

    Args:
        content: the whole `config.json`.
        theta: base of a file that does not tell it.
        partial_rotary_factor: share of a head that is rotated, likewise; None: transformers does
            not read the key, and rotates all of a head.
        source: the file's name for messages.
        positions: the longest sequence.
        scaling: that of a file that does not tell it; None: none.
        by_layer_type: they may be given by layer type; those of layers without a window are read.

    Raises:
        UserError: the scaling is no mapping, or of another kind for some layers; or a share of a
            head is told of a family that rotates all of it.
    """
    scaling = content.get("rope_scaling") or content.get("rope_parameters") or scaling or {}
    if by_layer_type and isinstance(scaling, Mapping) and "full_attention" in scaling:
        local = scaling.get("sliding_attention")
        for key, carried in (("rope_type", "default"), ("partial_rotary_factor", 1.0)):
            given = local.get(key) if isinstance(local, Mapping) else None
            if given not in (None, carried):
                raise UserError(
                    f"{source}: {key} {shown(given)} in layers with a window is not carried; "
                    f"{carried!r} would be"
                )
        scaling = scaling["full_attention"]
    if not isinstance(scaling, Mapping) or any(isinstance(each, dict) for each in scaling.values()):
        raise UserError(f"{source}: rope_parameters must be one mapping for all layers")
    rope = {key: value for key, value in scaling.items() if value is not None and key not in _NOTES}
    if (name := rope.pop("type", None)) is not None:
        rope.setdefault("rope_type", name)
    for key, default in (
        ("rope_theta", theta),
        ("partial_rotary_factor", partial_rotary_factor or 1.0),
    ):
        given = content.get(key)
        rope.setdefault(key, default if given is None else given)
    share = rope["partial_rotary_factor"]
    if partial_rotary_factor is None and share != 1:
        raise UserError(
            f"{source}: partial_rotary_factor {shown(share)} is not carried: "
            "transformers rotates all of a head in this family; 1 would be"
        )
    if rope.get("rope_type") in _NEEDING_ORIGINAL:
        rope.setdefault("original_max_position_embeddings", positions)
    return rope


def write_rope(
    rope: RopeParameters, *, scaled: bool = False, has_share: bool = False
) -> dict[str, Any]:
    """Return the keys of `config.json` about `rope`.

    Args:
        rope: the positions.
        scaled: transformers scales where the file does not tell, so that it has to tell of none
            too.
        has_share: transformers reads the share of a head that is rotated.
    """
    scaling = rope.model_dump(exclude={"rope_theta", "partial_rotary_factor"}, exclude_none=True)
    written = {
        "rope_theta": rope.rope_theta,
        "rope_scaling": scaling if scaled or rope.rope_type != "default" else None,
    }
    if has_share:
        written["partial_rotary_factor"] = rope.partial_rotary_factor
    return written
