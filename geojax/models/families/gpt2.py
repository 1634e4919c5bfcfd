"""GPT-2, whose architecture is GPT-3's: learned positions, LayerNorm, GELU, biases everywhere.

Its linear layers are [inputs, outputs], as geojax's are; queries, keys and values are one tensor.
"""

from collections.abc import Mapping
from typing import Any

from geojax.models.huggingface.family import ConfigKey, Family, TensorRule


def _layer(theirs: str, *owners: str) -> tuple[TensorRule, TensorRule]:
    """Return the rules of the weight and the bias of a norm or a linear layer."""
    kind = "scale" if theirs.startswith("ln") else "kernel"
    name = f"transformer.h.{{layer}}.{theirs}"
    return (
        TensorRule(f"{name}.weight", tuple(f"layers.{owner}.{kind}" for owner in owners)),
        TensorRule(f"{name}.bias", tuple(f"layers.{owner}.bias" for owner in owners)),
    )


def _usual_width(content: Mapping[str, Any]) -> Any:
    width = content["n_embd"]
    return 4 * width if isinstance(width, int) else width


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys=(
        ConfigKey("n_layer", ("num_hidden_layers",)),
        ConfigKey("n_embd", ("hidden_size",)),
        ConfigKey("n_head", ("num_attention_heads",)),
        ConfigKey("vocab_size", ("vocab_size",)),
        ConfigKey("n_inner", ("intermediate_size",), _usual_width),
        ConfigKey("n_positions", ("max_position_embeddings",), 1024),
        ConfigKey("layer_norm_epsilon", ("rms_norm_eps",), 1e-5),
        ConfigKey("initializer_range", ("initializer_range",), 0.02),
        ConfigKey("embd_pdrop", ("dropout",), 0.1),
        ConfigKey("resid_pdrop", ("dropout",), 0.1),
        ConfigKey("tie_word_embeddings", ("tie_word_embeddings",), True),
    ),
    implied={
        "norm": "layernorm",
        "hidden_act": "gelu_pytorch_tanh",
        "position_embedding_type": "learned_absolute",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    },
    fixed={
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    rates={"attn_pdrop": 0.0},
    tensors=(
        TensorRule("transformer.wte.weight", ("embedding.tokens.embedding",)),
        TensorRule("transformer.wpe.weight", ("embedding.positions.embedding",)),
        *_layer("ln_1", "attention_norm"),
        *_layer("attn.c_attn", "attention.query", "attention.key", "attention.value"),
        *_layer("attn.c_proj", "attention.output"),
        *_layer("ln_2", "feed_forward_norm"),
        *_layer("mlp.c_fc", "feed_forward.up"),
        *_layer("mlp.c_proj", "feed_forward.down"),
        TensorRule("transformer.ln_f.weight", ("final_norm.scale",)),
        TensorRule("transformer.ln_f.bias", ("final_norm.bias",)),
        TensorRule("lm_head.weight", ("head.kernel",), transposed=True),
    ),
    ignored_keys=frozenset(
        {"n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"}
        | {"summary_type", "summary_use_proj"}
    ),
    base_prefix="transformer.",
    # Its causal mask, in old checkpoints.
    ignored_tensors=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    has_rope=False,
)
