"""SmolLM3: Llama, some of whose layers have no positions."""

from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import pydantic

from geojax.models.block import Block
from geojax.models.config import ModelConfig
from geojax.models.context import LayerContext
from geojax.models.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    FEED_FORWARD,
    SILU,
    SIZES,
    SWIGLU,
)
from geojax.models.huggingface.family import ConfigKey, Family
from geojax.models.self_attention import Attention, RotaryTable


class NopeAttention(Attention):
    """Attention that leaves queries and keys of some layers as they are."""

    def _rotary(self, context: LayerContext) -> RotaryTable | None:
        rotary = super()._rotary(context)
        assert isinstance(self.config, SmolLM3)
        assert rotary is not None, "positions are rotary"
        assert context.layer is not None, "layers that differ have numbers"
        rotates = jnp.asarray(self.config.no_rope_layers, bool)[context.layer]
        cosine, sine = rotary
        # Layers that differ in data alone are one program: no angle rotates nothing.
        return jnp.where(rotates, cosine, 1), jnp.where(rotates, sine, 0)


class NopeBlock(Block):
    """A layer of it."""

    attention_class = NopeAttention


def _every_fourth(given: dict[str, Any]) -> tuple[Literal[0, 1], ...]:
    return _of_interval(given["num_hidden_layers"], 4)


def _of_interval(layers: int, interval: int) -> tuple[Literal[0, 1], ...]:
    return tuple(1 if layer % interval else 0 for layer in range(1, layers + 1))


class SmolLM3(ModelConfig):
    """A model whose layers have positions or none."""

    block_class = NopeBlock
    model_type: Literal["smollm3"] = "smollm3"
    """Family of the model."""
    no_rope_layers: tuple[Literal[0, 1], ...] = pydantic.Field(default_factory=_every_fourth)
    """1 for each layer with rotary positions, 0 for one without. Default: every fourth has none."""

    @pydantic.model_validator(mode="after")
    def _each_layer_is_told(self) -> "SmolLM3":
        if len(self.no_rope_layers) != self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {len(self.no_rope_layers)} entries for "
                f"{self.num_hidden_layers} layers; it needs one for each"
            )
        return self


def _told(content: Mapping[str, Any]) -> Any:
    layers, interval = content["num_hidden_layers"], content.get("no_rope_layer_interval", 4)
    return _of_interval(layers, interval)


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    settings=SmolLM3,
    keys=(
        *(key for key in SIZES if key.name != "tie_word_embeddings"),
        ConfigKey("tie_word_embeddings", ("tie_word_embeddings",), True),
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 4),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 32768),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
        ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        ConfigKey("mlp_bias", ("mlp_bias",), False),
        ConfigKey("no_rope_layers", ("no_rope_layers",), _told),
    ),
    implied=SWIGLU,
    fixed=SILU | {"use_sliding_window": False},
    rates=ATTENTION_DROPOUT,
    written={"pad_token_id": None},
    ignored_keys=frozenset({"no_rope_layer_interval", "sliding_window", "layer_types"}),
    tensors=EMBEDDING_AND_HEAD + ATTENTION + FEED_FORWARD,
    rope_theta=2_000_000.0,
)
