"""Qwen 3, dense and of experts: Llama with norms of queries and keys."""

from geojax.models.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    FEED_FORWARD,
    SILU,
    SIZES,
    SWIGLU,
)
from geojax.models.families.qwen2 import NO_WINDOW, WINDOW_KEYS
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule

QK_NORM = tuple(
    TensorRule(
        f"model.layers.{{layer}}.self_attn.{theirs}_norm.weight",
        (f"layers.attention.{own}_norm.scale",),
    )
    for theirs, own in (("q", "query"), ("k", "key"))
)
_EXPERTS = (
    TensorRule("model.layers.{layer}.mlp.gate.weight", ("layers.router.kernel",), transposed=True),
    *(
        TensorRule(
            f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}_proj.weight",
            (f"layers.experts.{name}.kernel",),
            transposed=True,
        )
        for name in ("gate", "up", "down")
    ),
)
_KEYS = (
    ConfigKey("max_position_embeddings", ("max_position_embeddings",), 32768),
    ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
    ConfigKey("attention_bias", ("qkv_bias", "attention_output_bias"), False),
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=(
        *(key for key in SIZES if key.name != "head_dim"),
        ConfigKey("head_dim", ("head_dim",), 128),
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 32),
        *_KEYS,
    ),
    implied=SWIGLU | {"use_qk_norm": True},
    fixed=SILU | NO_WINDOW,
    rates=ATTENTION_DROPOUT,
    ignored_keys=WINDOW_KEYS,
    tensors=EMBEDDING_AND_HEAD + ATTENTION + QK_NORM + FEED_FORWARD,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(
        *SIZES,
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 4),
        *_KEYS,
        ConfigKey("moe_intermediate_size", ("moe_intermediate_size",), 768),
        ConfigKey("num_experts", ("num_experts",), 128, alias="num_local_experts"),
        ConfigKey("num_experts_per_tok", ("num_experts_per_tok",), 8),
        ConfigKey("norm_topk_prob", ("norm_topk_prob",), False),
        ConfigKey("router_aux_loss_coef", ("router_aux_loss_coef",), 0.001),
    ),
    implied=SWIGLU | {"use_qk_norm": True},
    # Every layer has experts.
    fixed=SILU | NO_WINDOW | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    rates=ATTENTION_DROPOUT,
    ignored_keys=WINDOW_KEYS,
    tensors=EMBEDDING_AND_HEAD + ATTENTION + QK_NORM + _EXPERTS,
)
