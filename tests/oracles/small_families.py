"""A small random model of each family: sizes that do not divide, grouped heads, tied and not."""

import torch
from transformers import (
    AutoModelForCausalLM,
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

_SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_LATENT = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
_GPT2_SIZES = {
    "n_layer": 2,
    "n_embd": 24,
    "n_head": 4,
    "n_inner": 40,
    "vocab_size": 37,
    "n_positions": 64,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
_LOCAL = {"rope_type": "default", "rope_theta": 10.0}
_ROTARY = {
    "RotaryEmbedding.compute_default_rope_parameters",
    "RotaryEmbedding.forward",
    "eager_attention_forward",
}
_USUAL = {"RMSNorm.forward", *_ROTARY}
_SCALED = _USUAL - {"RotaryEmbedding.compute_default_rope_parameters"}
_NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES = {
    "llama": (
        LlamaConfig(**_SIZES, head_dim=8, rope_parameters=_LLAMA3),
        _SCALED | {"_compute_llama3_parameters"},
    ),
    "llama-tied-biases": (
        LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        _USUAL,
    ),
    "qwen2": (
        Qwen2Config(**_SIZES, head_dim=8, tie_word_embeddings=True, rope_parameters=_YARN),
        _SCALED | {"_compute_yarn_parameters"},
    ),
    "qwen3": (Qwen3Config(**_SIZES, head_dim=8), _USUAL),
    "qwen3-moe": (
        Qwen3MoeConfig(
            **_SIZES,
            head_dim=8,
            attention_bias=True,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
        ),
        _USUAL | {"TopKRouter.forward"},
    ),
    "mistral": (
        MistralConfig(**_SIZES, head_dim=8, sliding_window=None, rope_parameters=_LINEAR),
        _SCALED | {"_compute_linear_scaling_rope_parameters"},
    ),
    "mistral-window": (MistralConfig(**_SIZES, sliding_window=3), _USUAL),
    "ministral": (
        MinistralConfig(
            **_SIZES,
            head_dim=8,
            sliding_window=3,
            layer_types=["full_attention", "sliding_attention"],
        ),
        _USUAL,
    ),
    "gemma2": (
        Gemma2Config(
            **_SIZES,
            head_dim=8,
            query_pre_attn_scalar=6,
            sliding_window=3,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
            use_bidirectional_attention=False,
        ),
        _USUAL,
    ),
    "gemma3": (
        Gemma3TextConfig(
            **_SIZES | {"num_hidden_layers": 3},
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False,
            rope_parameters={"full_attention": _LINEAR, "sliding_attention": _LOCAL},
        ),
        _USUAL | {"_compute_linear_scaling_rope_parameters"},
    ),
    "mixtral": (
        MixtralConfig(**_SIZES, num_local_experts=4, router_aux_loss_coef=0.0),
        _USUAL | {"TopKRouter.forward"},
    ),
    "deepseek-v3": (
        DeepseekV3Config(
            **_SIZES | _LATENT | {"num_hidden_layers": 4, "num_key_value_heads": 4},
            v_head_dim=5,
            first_k_dense_replace=2,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=16,
            num_mtp_layers=0,
            rope_parameters=_YARN | {"mscale": 0.9, "mscale_all_dim": 0.7},
        ),
        _SCALED | {"_compute_yarn_parameters", "TopkRouter.forward"},
    ),
    "deepseek-v3-whole-queries": (
        DeepseekV3Config(
            **_SIZES | _LATENT | {"q_lora_rank": None, "num_key_value_heads": 4},
            v_head_dim=8,
            first_k_dense_replace=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            num_mtp_layers=0,
        ),
        _USUAL | {"TopkRouter.forward"},
    ),
    "gpt-oss": (
        GptOssConfig(
            **_SIZES | {"num_hidden_layers": 3},
            head_dim=8,
            sliding_window=3,
            num_local_experts=5,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.0,
            swiglu_alpha=1.3,
            swiglu_limit=0.5,
            rope_parameters=_YARN | {"truncate": False},
        ),
        _SCALED - {"eager_attention_forward"} | {"_compute_yarn_parameters"},
    ),
    "nemotron": (NemotronConfig(**_SIZES, head_dim=8), _ROTARY),
    "gpt2": (GPT2Config(**_GPT2_SIZES, **_NO_DROPOUT), set()),
}
"""Each model's config, and the functions of its module that cast to float32."""


def save_small_llama(folder, dtype=torch.float32, **changes):
    """Save a random Llama for the vocabulary that `prepare_corpus` makes, as transformers does."""
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=36,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=52,
        vocab_size=301,
        max_position_embeddings=32,
        initializer_range=0.2,
        **changes,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
