"""The kinds of layers in `config.json`: every layer's there, a period that repeats in geojax."""

from collections.abc import Mapping
from typing import Any

from geojax.models.config import ModelConfig
from geojax.models.huggingface.family import ConfigKey

_MOST_LAYERS = 2**11


def sliding_window(default: int) -> ConfigKey:
    """Make the key of a family by layer types, which needs a window even if no layer has it."""
    return ConfigKey(
        "sliding_window",
        ("sliding_window",),
        default,
        write=lambda model: model.sliding_window or default,
    )


def layer_types(period: int | None, key: str | None = None) -> ConfigKey:
    """Make the key of a family in which, unless told, each `period`-th layer has no window.

    Args:
        period: distance of layers without a window; None: all layers are alike.
        key: key of the file that may tell another period in place of the types.
    """

    def default(content: Mapping[str, Any]) -> list[Any] | None:
        if period is None:
            return None
        every = (content.get(key) if key else None) or period
        layers = content["num_hidden_layers"]
        if not isinstance(every, int):
            return [every]  # which is no type, and refused as such
        if not isinstance(layers, int) or layers > _MOST_LAYERS:
            return None  # that number is refused
        return [
            "sliding_attention" if layer % every else "full_attention"
            for layer in range(1, layers + 1)
        ]

    return ConfigKey("layer_types", ("layer_types",), default, write=_all_layers)


def _all_layers(model: ModelConfig) -> list[str]:
    kinds = model.layer_types
    return [kinds[layer % len(kinds)] for layer in range(model.num_hidden_layers)]
