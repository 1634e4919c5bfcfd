"""Config keys that have another name than they once had."""

from collections.abc import Mapping
from typing import Any

RENAMED_KEYS = {
    "pipeline.dc_role": "dc.role",
    "pipeline.chunks": "pipeline.virtual_stages",
}
"""The dotted key that replaces each dotted key of before."""

RENAMED_VALUES = {
    ("pipeline.schedule", "one_f_one_b"): "1f1b",
    ("pipeline.schedule", "extended_warmup"): "geopipe",
}
"""The value that replaces a value of before, by its dotted key."""


def refuse_renamed(content: Mapping[str, Any]) -> None:
    """Refuse a config that uses a name of before.

    Raises:
        ValueError: it does; with the name that replaces it.
    """
    for old, new in RENAMED_KEYS.items():
        if _lookup(content, old) is not None:
            raise ValueError(f"{old}: renamed; use {new}")
    for (key, old), new in RENAMED_VALUES.items():
        if _lookup(content, key) == old:
            raise ValueError(f"{key}: {old} was renamed; use {new}")


def _lookup(content: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(content, Mapping):
            return None
        content = content.get(part)
    return content
