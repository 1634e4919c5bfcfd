"""A small model of each family: every feature on, odd sizes."""

from geojax.models import ModelConfig, RopeParameters

_SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 37,
}
_LLAMA3 = RopeParameters(
    rope_type="llama3",
    rope_theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
FAMILIES = {
    "gpt3": ModelConfig(
        **_SMALL,
        max_position_embeddings=16,
        norm="layernorm",
        hidden_act="gelu_pytorch_tanh",
        position_embedding_type="learned_absolute",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "llama": ModelConfig(
        **_SMALL,
        num_key_value_heads=2,
        max_position_embeddings=64,
        head_dim=8,
        rope_parameters=_LLAMA3,
    ),
    "nemotron": ModelConfig(
        **_SMALL,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        norm="layernorm1p",
        hidden_act="relu2",
        rope_parameters=RopeParameters(partial_rotary_factor=0.5),
    ),
    "mixture": ModelConfig(
        **_SMALL | {"intermediate_size": 12},
        head_dim=8,
        max_position_embeddings=64,
        swiglu_limit=0.5,
        swiglu_alpha=1.3,
        use_qk_norm=True,
        use_attention_sinks=True,
        moe_bias=True,
        num_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        norm_topk_prob=False,
        router_aux_loss_coef=0.5,
    ),
}
