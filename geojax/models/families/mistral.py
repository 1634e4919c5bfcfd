"""Mistral, with a window (v0.1) or without, and Ministral, where only some layers have it.

Their tensors are Llama's.
"""

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
from geojax.models.huggingface.layer_types import layer_types, sliding_window

_KEYS = (
    *SIZES,
    ConfigKey("num_key_value_heads", ("num_key_value_heads",), 8),
    ConfigKey("max_position_embeddings", ("max_position_embeddings",), 131072),
    ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(*_KEYS, ConfigKey("sliding_window", ("sliding_window",), 4096)),
    implied=SWIGLU,
    fixed=SILU,
    rates=ATTENTION_DROPOUT,
    tensors=EMBEDDING_AND_HEAD + ATTENTION + FEED_FORWARD,
)

MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    keys=(*_KEYS, sliding_window(4096), layer_types(None)),
    implied=SWIGLU,
    fixed=SILU,
    rates=ATTENTION_DROPOUT,
    tensors=EMBEDDING_AND_HEAD + ATTENTION + FEED_FORWARD,
)
