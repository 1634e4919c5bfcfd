"""Mixtral: Llama's attention, and experts in every layer."""

from geojax.models.families.llama import (
    ATTENTION,
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    SILU,
    SIZES,
    SWIGLU,
)
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule

_EXPERTS = tuple(
    TensorRule(
        f"model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}.{theirs}.weight",
        (f"layers.experts.{own}.kernel",),
        transposed=True,
    )
    for theirs, own in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
)
_ROUTER = TensorRule(
    "model.layers.{layer}.block_sparse_moe.gate.weight", ("layers.router.kernel",), transposed=True
)

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=(
        *(key for key in SIZES if key.name != "intermediate_size"),
        ConfigKey("intermediate_size", ("intermediate_size", "moe_intermediate_size")),
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), 8),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 131072),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-5),
        ConfigKey("sliding_window", ("sliding_window",), None),
        ConfigKey("num_local_experts", ("num_experts",), 8),
        ConfigKey("num_experts_per_tok", ("num_experts_per_tok",), 2),
        ConfigKey("router_aux_loss_coef", ("router_aux_loss_coef",), 0.001),
    ),
    implied=SWIGLU | {"norm_topk_prob": True},
    fixed=SILU,
    rates=ATTENTION_DROPOUT | {"router_jitter_noise": 0.0},
    tensors=(*EMBEDDING_AND_HEAD, *ATTENTION, _ROUTER, *_EXPERTS),
    rope_theta=1e6,
)
