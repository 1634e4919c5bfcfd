"""Mistral without a window: Llama's tensors."""

from geojax.models.huggingface.families.llama import (
    ATTENTION,
    EMBEDDING_AND_HEAD,
    FEED_FORWARD,
    SILU,
    SIZES,
    SWIGLU,
)
from geojax.models.huggingface.family import ConfigKey, Family

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(
        *SIZES,
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 8),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 131072),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
    ),
    implied=SWIGLU,
    fixed=SILU | {"sliding_window": None},
    required_keys=frozenset({"sliding_window"}),
    tensors=EMBEDDING_AND_HEAD + ATTENTION + FEED_FORWARD,
)
