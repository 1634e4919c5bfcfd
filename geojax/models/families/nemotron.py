"""Nemotron-3 and Nemotron-4: LayerNorm1p, squared ReLU without a gate, half of a head rotated."""

from geojax.models.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    FEED_FORWARD,
    SIZES,
)
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule

_NORM_BIASES = (
    TensorRule("model.layers.{layer}.input_layernorm.bias", ("layers.attention_norm.bias",)),
    TensorRule(
        "model.layers.{layer}.post_attention_layernorm.bias", ("layers.feed_forward_norm.bias",)
    ),
    TensorRule("model.norm.bias", ("final_norm.bias",)),
)

NEMOTRON = Family(
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    keys=(
        *(key for key in SIZES if key.name != "initializer_range"),
        ConfigKey("initializer_range", ("initializer_range",), 0.0134),
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), None),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 4096),
        ConfigKey("norm_eps", ("rms_norm_eps",), 1e-5),
        ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        ConfigKey("mlp_bias", ("mlp_bias",), False),
    ),
    implied={"norm": "layernorm1p", "hidden_act": "relu2", "position_embedding_type": "rope"},
    fixed={"hidden_act": "relu2"},
    rates=ATTENTION_DROPOUT,
    tensors=EMBEDDING_AND_HEAD + ATTENTION + _NORM_BIASES + FEED_FORWARD,
    partial_rotary_factor=0.5,
)
