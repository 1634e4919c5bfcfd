"""A small random model of each family: sizes that do not divide, grouped heads, tied and not."""

import importlib
import pkgutil
from pathlib import Path

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

SIZES = {
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
LATENT = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 10.0}
ROTARY = {
    "RotaryEmbedding.compute_default_rope_parameters",
    "RotaryEmbedding.forward",
    "eager_attention_forward",
}
USUAL = {"RMSNorm.forward", *ROTARY}
SCALED = USUAL - {"RotaryEmbedding.compute_default_rope_parameters"}
_NO_DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES = {
    "llama": (
        LlamaConfig(**SIZES, head_dim=8, rope_parameters=LLAMA3),
        SCALED | {"_compute_llama3_parameters"},
    ),
    "llama-tied-biases": (
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        USUAL,
    ),
    "qwen2": (
        Qwen2Config(**SIZES, head_dim=8, tie_word_embeddings=True, rope_parameters=YARN),
        SCALED | {"_compute_yarn_parameters"},
    ),
    "qwen3": (Qwen3Config(**SIZES, head_dim=8), USUAL),
    "qwen3-moe": (
        Qwen3MoeConfig(
            **SIZES,
            head_dim=8,
            attention_bias=True,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            norm_topk_prob=True,
            router_aux_loss_coef=0.0,
        ),
        USUAL | {"TopKRouter.forward"},
    ),
    "mistral": (
        MistralConfig(**SIZES, head_dim=8, sliding_window=None, rope_parameters=LINEAR),
        SCALED | {"_compute_linear_scaling_rope_parameters"},
    ),
    "mistral-window": (MistralConfig(**SIZES, sliding_window=3), USUAL),
    "ministral": (
        MinistralConfig(
            **SIZES,
            head_dim=8,
            sliding_window=3,
            layer_types=["full_attention", "sliding_attention"],
        ),
        USUAL,
    ),
    "gemma2": (
        Gemma2Config(
            **SIZES,
            head_dim=8,
            query_pre_attn_scalar=6,
            sliding_window=3,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=2.0,
            use_bidirectional_attention=False,
        ),
        USUAL,
    ),
    "gemma3": (
        Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 3},
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False,
            rope_parameters={"full_attention": LINEAR, "sliding_attention": LOCAL},
        ),
        USUAL | {"_compute_linear_scaling_rope_parameters"},
    ),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=4, router_aux_loss_coef=0.0),
        USUAL | {"TopKRouter.forward"},
    ),
    "deepseek-v3": (
        DeepseekV3Config(
            **SIZES | LATENT | {"num_hidden_layers": 4, "num_key_value_heads": 4},
            v_head_dim=5,
            first_k_dense_replace=2,
            n_routed_experts=12,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=16,
            num_mtp_layers=0,
            rope_parameters=YARN | {"mscale": 0.9, "mscale_all_dim": 0.7},
        ),
        SCALED | {"_compute_yarn_parameters", "TopkRouter.forward"},
    ),
    "deepseek-v3-whole-queries": (
        DeepseekV3Config(
            **SIZES | LATENT | {"q_lora_rank": None, "num_key_value_heads": 4},
            v_head_dim=8,
            first_k_dense_replace=1,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            num_mtp_layers=0,
        ),
        USUAL | {"TopkRouter.forward"},
    ),
    "gpt-oss": (
        GptOssConfig(
            **SIZES | {"num_hidden_layers": 3},
            head_dim=8,
            sliding_window=3,
            num_local_experts=5,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.0,
            swiglu_alpha=1.3,
            swiglu_limit=0.5,
            rope_parameters=YARN | {"truncate": False},
        ),
        SCALED - {"eager_attention_forward"} | {"_compute_yarn_parameters"},
    ),
    "nemotron": (NemotronConfig(**SIZES, head_dim=8), ROTARY),
    "gpt2": (GPT2Config(**_GPT2_SIZES, **_NO_DROPOUT), set()),
}
"""Each model's config, and the functions of its module that cast to float32; those of the files in
`small/` too."""


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


for _each in pkgutil.iter_modules([str(Path(__file__).with_name("small"))]):
    FAMILIES |= importlib.import_module(f"small.{_each.name}").FAMILIES
