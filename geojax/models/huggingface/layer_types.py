"""The kinds of layers in `config.json`: every layer's there, a period that repeats in geojax."""

from collections.abc import Mapping
from typing import Any

from geojax.models.config import ModelConfig
from geojax.models.huggingface.family import ConfigKey


def layer_types(period: int | None) -> ConfigKey:
    """Make the key of a family in which, unless told, each `period`-th layer has no window.

    `period` None: all layers are alike.
    """

    def default(content: Mapping[str, Any]) -> list[str] | None:
        if period is None:
            return None
        return ["sliding_attention"] * (period - 1) + ["full_attention"]

    return ConfigKey("layer_types", ("layer_types",), default, write=_all_layers)


def _all_layers(model: ModelConfig) -> list[str]:
    kinds = model.layer_types
    return [kinds[layer % len(kinds)] for layer in range(model.num_hidden_layers)]
