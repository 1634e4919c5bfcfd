"""The kinds of layers in `config.json`: every layer's there, a period that repeats in geojax."""

from collections.abc import Mapping
from typing import Any

from geojax.models.config import ModelConfig
from geojax.models.huggingface.family import ConfigKey


def layer_types(period: int | None) -> ConfigKey:
    """Make the key of a family in which, unless told, each `period`-th layer has no window.

    `period` None: all layers are alike. A file may tell its period in place of the types.
    """

    def default(content: Mapping[str, Any]) -> list[str] | None:
        if period is None:
            return None
        every = content.get("sliding_window_pattern") or period
        return [
            "sliding_attention" if layer % every else "full_attention"
            for layer in range(1, content["num_hidden_layers"] + 1)
        ]

    return ConfigKey("layer_types", ("layer_types",), default, write=_all_layers)


def _all_layers(model: ModelConfig) -> list[str]:
    kinds = model.layer_types
    return [kinds[layer % len(kinds)] for layer in range(model.num_hidden_layers)]
