"""Qwen 2 and 2.5: Llama with biases on queries, keys and values."""

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

NO_WINDOW = {"use_sliding_window": False}
"""Key of `config.json` of which Qwen's families carry one value."""

WINDOW_KEYS = frozenset({"sliding_window", "max_window_layers", "layer_types"})
"""Keys about the window that `NO_WINDOW` turns off."""

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=(
        *SIZES,
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 32),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 32768),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
    ),
    implied=SWIGLU | {"qkv_bias": True},
    fixed=SILU | NO_WINDOW,
    rates=ATTENTION_DROPOUT,
    unwritten={"use_mrope": False},
    ignored_keys=WINDOW_KEYS,
    tensors=EMBEDDING_AND_HEAD + ATTENTION + FEED_FORWARD,
)
