"""Gemma 2 and 3, text alone: norms on both sides of each block, and windows in most layers.

Norms store their scale minus 1, embeddings are scaled, and the feed-forward block is a gated GELU.
Gemma 2 caps logits and scores; Gemma 3 norms queries and keys, and its layers with a window have a
base of rotary positions of their own.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from geojax.models.config import ModelConfig
from geojax.models.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    FEED_FORWARD,
    SIZES,
)
from geojax.models.families.qwen3 import QK_NORM
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule
from geojax.models.huggingface.layer_types import layer_types, sliding_window

_NORMS = tuple(
    TensorRule(f"model.layers.{{layer}}.{theirs}_layernorm.weight", (f"layers.{own}.scale",))
    for theirs, own in (
        ("input", "attention_norm"),
        ("post_attention", "attention_post_norm"),
        ("pre_feedforward", "feed_forward_norm"),
        ("post_feedforward", "feed_forward_post_norm"),
    )
)
_TENSORS = (
    *EMBEDDING_AND_HEAD,
    *(rule for rule in ATTENTION if "layernorm" not in rule.name),
    *_NORMS,
    *FEED_FORWARD,
)


def _keys(cap_of_logits: float | None) -> tuple[ConfigKey, ...]:
    return (
        *(key for key in SIZES if key.name not in ("head_dim", "tie_word_embeddings")),
        ConfigKey("head_dim", ("head_dim",), 256),
        ConfigKey("tie_word_embeddings", ("tie_word_embeddings",), True),
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 4),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
        ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        ConfigKey("query_pre_attn_scalar", ("query_pre_attn_scalar",), 256),
        sliding_window(4096),
        ConfigKey("final_logit_softcapping", ("final_logit_softcapping",), cap_of_logits),
    )


def _local_base(content: Mapping[str, Any]) -> float:
    """Return the base of layers with a window, as transformers 5 writes it, or the default."""
    by_type: Any = content.get("rope_parameters")
    local = by_type.get("sliding_attention") if isinstance(by_type, Mapping) else None
    return local.get("rope_theta", 10_000.0) if isinstance(local, Mapping) else 10_000.0


def _written_local_base(model: ModelConfig) -> float:
    """Return the base of layers with a window, which transformers needs even if there is none."""
    return model.rope_local_base_freq or model.rope_parameters.rope_theta


def _has_local_base(model: ModelConfig) -> bool:
    """Return False where layers with a window are scaled like all: transformers scales none."""
    scaled = model.rope_parameters.rope_type != "default"
    return model.rope_local_base_freq is not None or not (scaled and any(model.has_window))


_IMPLIED = {
    "norm": "rmsnorm1p",
    "sandwich_norm": True,
    "hidden_act": "gelu_pytorch_tanh",
    "gated": True,
    "scale_embeddings": True,
    "position_embedding_type": "rope",
}
_FIXED = {
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
# In place of hidden_act transformers reads hidden_activation.
_IGNORED = frozenset({"hidden_act", "cache_implementation"})

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys=(
        *_keys(cap_of_logits=30.0),
        ConfigKey("attn_logit_softcapping", ("attn_logit_softcapping",), 50.0),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 8192),
        ConfigKey(
            "sliding_window_size",
            ("sliding_window",),
            lambda content: content.get("sliding_window", 4096),
            is_written=False,
        ),
        layer_types(2),
    ),
    implied=_IMPLIED,
    fixed=_FIXED,
    rates=ATTENTION_DROPOUT,
    unwritten={"sliding_window_pattern": 2, "_sliding_window_pattern": 2},
    tensors=_TENSORS,
    ignored_keys=_IGNORED,
)
GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys=(
        *_keys(cap_of_logits=None),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 131072),
        layer_types(6, "sliding_window_pattern"),
        ConfigKey(
            "rope_local_base_freq",
            ("rope_local_base_freq",),
            _local_base,
            write=_written_local_base,
            takes_null=False,
            can_express=_has_local_base,
        ),
    ),
    implied=_IMPLIED | {"use_qk_norm": True},
    fixed=_FIXED,
    rates=ATTENTION_DROPOUT,
    # transformers has the cap of scores in the config alone, and the patterns beside the types.
    unwritten={"attn_logit_softcapping": None},
    tensors=_TENSORS + QK_NORM,
    ignored_keys=_IGNORED | {"sliding_window_pattern", "_sliding_window_pattern"},
    rope_theta=1e6,
)

# What the published files leave to transformers.
_LEFT_OUT = {"vocab_size": 262208, "num_attention_heads": 8}
GEMMA3 = dataclasses.replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    keys=tuple(
        key._replace(default=_LEFT_OUT.get(key.name, key.default)) for key in GEMMA3_TEXT.keys
    ),
    nested_in="text_config",
    base_prefix="",
    tensors=tuple(
        rule._replace(name=f"language_model.{rule.name}") for rule in GEMMA3_TEXT.tensors
    ),
    ignored_tensors=r"(vision_tower|multi_modal_projector)\..*",
)
"""Gemma 3 with a vision encoder, of which the text model is read; it is written by itself."""
