"""The same families with every optional key of their config at another value than its default."""

from small_families import LATENT, LINEAR, LLAMA3, LOCAL, ROTARY, SCALED, SIZES, USUAL, YARN
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

_CHANGED = SIZES | {
    "num_key_value_heads": 1,
    "max_position_embeddings": 48,
    "rms_norm_eps": 3e-3,
    "head_dim": 10,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
}
_TIED = _CHANGED | {"tie_word_embeddings": True}
_WHOLE_YARN = YARN | {"beta_slow": 2.0, "truncate": False, "attention_factor": 1.3}
_PLAIN = {"rope_type": "default", "rope_theta": 500.0}
_LLAMA3_CAST = "_compute_llama3_parameters"
_LINEAR_CAST = "_compute_linear_scaling_rope_parameters"
_YARN_CAST = "_compute_yarn_parameters"


def _without(key):
    """The sizes without a key that a family has not."""
    return {name: each for name, each in _TIED.items() if name != key}


CHANGED_FAMILIES = {
    "llama-changed": (
        LlamaConfig(**_TIED, attention_bias=True, mlp_bias=True, rope_parameters=_WHOLE_YARN),
        SCALED | {_YARN_CAST},
    ),
    "qwen2-changed": (Qwen2Config(**_TIED, rope_parameters=LLAMA3), SCALED | {_LLAMA3_CAST}),
    "qwen3-changed": (
        Qwen3Config(**_TIED, attention_bias=True, rope_parameters=LINEAR),
        SCALED | {_LINEAR_CAST},
    ),
    "qwen3-moe-changed": (
        Qwen3MoeConfig(
            **_TIED,
            attention_bias=True,
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
            rope_parameters=_PLAIN,
        ),
        USUAL | {"TopKRouter.forward"},
    ),
    "mistral-changed": (
        MistralConfig(**_TIED, sliding_window=4, rope_parameters=LLAMA3),
        SCALED | {_LLAMA3_CAST},
    ),
    "ministral-changed": (
        MinistralConfig(
            **_TIED,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters=_WHOLE_YARN,
        ),
        SCALED | {_YARN_CAST},
    ),
    "gemma2-changed": (
        Gemma2Config(
            **_CHANGED | {"num_hidden_layers": 3},
            tie_word_embeddings=False,
            attention_bias=True,
            query_pre_attn_scalar=6,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            use_bidirectional_attention=False,
            rope_parameters=LINEAR,
        ),
        SCALED | {_LINEAR_CAST},
    ),
    "gemma3-changed": (
        Gemma3TextConfig(
            **_CHANGED,
            tie_word_embeddings=False,
            attention_bias=True,
            query_pre_attn_scalar=6,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
            final_logit_softcapping=2.0,
            rope_parameters={"full_attention": LLAMA3, "sliding_attention": LOCAL},
        ),
        USUAL | {_LLAMA3_CAST},
    ),
    "mixtral-changed": (
        MixtralConfig(
            **_TIED,
            num_local_experts=5,
            num_experts_per_tok=3,
            sliding_window=4,
            router_aux_loss_coef=0.0,
            rope_parameters=_PLAIN,
        ),
        USUAL | {"TopKRouter.forward"},
    ),
    "deepseek-v3-changed": (
        DeepseekV3Config(
            **_without("head_dim") | LATENT | {"num_hidden_layers": 3, "num_key_value_heads": 4},
            v_head_dim=5,
            first_k_dense_replace=1,
            n_routed_experts=6,
            num_experts_per_tok=2,
            n_group=3,
            topk_group=2,
            n_shared_experts=2,
            moe_intermediate_size=16,
            norm_topk_prob=False,
            routed_scaling_factor=1.7,
            rope_interleave=False,
            num_mtp_layers=0,
            rope_parameters=_PLAIN,
        ),
        USUAL | {"TopkRouter.forward"},
    ),
    "gpt-oss-changed": (
        GptOssConfig(
            **_TIED,
            attention_bias=False,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention"],
            num_local_experts=5,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.0,
            swiglu_alpha=1.3,
            swiglu_limit=0.5,
            rope_parameters=_PLAIN,
        ),
        USUAL - {"eager_attention_forward"},
    ),
    "nemotron-changed": (
        NemotronConfig(
            **_without("rms_norm_eps"),
            norm_eps=3e-3,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=_PLAIN | {"partial_rotary_factor": 1.0},
        ),
        ROTARY,
    ),
    "gpt2-changed": (
        GPT2Config(
            n_layer=2,
            n_embd=24,
            n_head=4,
            n_inner=None,
            vocab_size=37,
            n_positions=48,
            initializer_range=0.2,
            layer_norm_epsilon=3e-3,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            attn_pdrop=0.2,
            tie_word_embeddings=False,
        ),
        set(),
    ),
}
"""Each model's config, and the functions of its module that cast to float32."""
