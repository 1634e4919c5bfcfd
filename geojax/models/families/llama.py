"""Llama 2 and 3.x; also the table of tensors that its descendants share."""

from geojax.models.huggingface.family import ConfigKey, Family, TensorRule, same_names

SIZES = (
    *same_names(
        "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"
    ),
    ConfigKey("head_dim", ("head_dim",), None),
    ConfigKey("initializer_range", ("initializer_range",), 0.02),
    ConfigKey("tie_word_embeddings", ("tie_word_embeddings",), False),
)

SWIGLU = {"norm": "rmsnorm", "hidden_act": "silu", "position_embedding_type": "rope"}
"""Fields of `ModelConfig` that Llama and its descendants imply."""

SILU = {"hidden_act": "silu"}
"""Keys of `config.json` of which Llama and its descendants carry one value."""

ATTENTION_DROPOUT = {"attention_dropout": 0.0}
"""Rates that end with training; see `Family.rates`."""

EMBEDDING_AND_HEAD = (
    TensorRule("model.embed_tokens.weight", ("embedding.tokens.embedding",)),
    TensorRule("model.norm.weight", ("final_norm.scale",)),
    TensorRule("lm_head.weight", ("head.kernel",), transposed=True),
)

ATTENTION = (
    TensorRule("model.layers.{layer}.input_layernorm.weight", ("layers.attention_norm.scale",)),
    *(
        rule
        for theirs, own in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
        for rule in (
            TensorRule(
                f"model.layers.{{layer}}.self_attn.{theirs}_proj.weight",
                (f"layers.attention.{own}.kernel",),
                transposed=True,
            ),
            TensorRule(
                f"model.layers.{{layer}}.self_attn.{theirs}_proj.bias",
                (f"layers.attention.{own}.bias",),
            ),
        )
    ),
    TensorRule(
        "model.layers.{layer}.post_attention_layernorm.weight",
        ("layers.feed_forward_norm.scale",),
    ),
)

FEED_FORWARD = tuple(
    rule
    for name in ("gate", "up", "down")
    for rule in (
        TensorRule(
            f"model.layers.{{layer}}.mlp.{name}_proj.weight",
            (f"layers.feed_forward.{name}.kernel",),
            transposed=True,
        ),
        TensorRule(
            f"model.layers.{{layer}}.mlp.{name}_proj.bias", (f"layers.feed_forward.{name}.bias",)
        ),
    )
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=(
        *SIZES,
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), None),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 2048),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
        ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), False),
        ConfigKey("mlp_bias", ("mlp_bias",), False),
    ),
    implied=SWIGLU,
    fixed=SILU,
    rates=ATTENTION_DROPOUT,
    # SmolLM 2 has the latter two.
    unwritten={"rope_interleaved": False},
    ignored_keys=frozenset({"pretraining_tp", "is_llama_config"}),
    tensors=EMBEDDING_AND_HEAD + ATTENTION + FEED_FORWARD,
    ignored_tensors=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)
