"""gpt-oss: attention with sinks, windows in every second layer, and experts with biases.

Checkpoints as published hold the experts' matrices in MXFP4, which are read; they are written in
bfloat16 or wider.
"""

from geojax.models.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    SILU,
    SIZES,
    SWIGLU,
)
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule
from geojax.models.huggingface.layer_types import layer_types, sliding_window

_SINKS = TensorRule("model.layers.{layer}.self_attn.sinks", ("layers.attention.sinks",))
_ROUTER = (
    TensorRule(
        "model.layers.{layer}.mlp.router.weight", ("layers.router.kernel",), transposed=True
    ),
    TensorRule("model.layers.{layer}.mlp.router.bias", ("layers.router.bias",)),
)
_EXPERTS = tuple(
    TensorRule(
        f"model.layers.{{layer}}.mlp.experts.{theirs}{suffix}",
        tuple(f"layers.experts.{name}.{kind}" for name in own),
        stacks_experts=True,
        interleaved=len(own) > 1,
    )
    for theirs, own in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
    for suffix, kind in (("", "kernel"), ("_bias", "bias"))
)
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    keys=(
        *(key for key in SIZES if key.name not in ("head_dim", "intermediate_size")),
        ConfigKey("head_dim", ("head_dim",), 64),
        ConfigKey("intermediate_size", ("intermediate_size", "moe_intermediate_size")),
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 8),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 131072),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-5),
        ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), True),
        sliding_window(128),
        layer_types(2),
        ConfigKey("num_local_experts", ("num_experts",), 128, alias="num_experts"),
        ConfigKey("num_experts_per_tok", ("num_experts_per_tok",), 4),
        ConfigKey("swiglu_alpha", ("swiglu_alpha",), 1.702),
        ConfigKey("swiglu_limit", ("swiglu_limit",), 7.0, takes_null=False),
        ConfigKey("router_aux_loss_coef", ("router_aux_loss_coef",), 0.001),
    ),
    implied=SWIGLU | {"use_attention_sinks": True, "moe_bias": True, "norm_topk_prob": True},
    fixed=SILU,
    rates=ATTENTION_DROPOUT,
    tensors=(*EMBEDDING_AND_HEAD, *ATTENTION, _SINKS, *_ROUTER, *_EXPERTS),
    # They say the same as num_experts_per_tok and the scaling of rotary positions.
    ignored_keys=frozenset({"experts_per_token", "initial_context_length"}),
    rope_theta=150_000.0,
    rope_scaling=_YARN,
    quantization="mxfp4",
)
