"""DeepSeek-V3 and Kimi K2: latent attention, first dense layers, then experts in groups.

Checkpoints as published hold FP8 numbers with a scale for each block: they are to be converted to
bfloat16 first, for which DeepSeek publishes a script.
"""

import dataclasses

from geojax.models.families.llama import (
    ATTENTION_DROPOUT,
    EMBEDDING_AND_HEAD,
    FEED_FORWARD,
    SILU,
    SIZES,
    SWIGLU,
)
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule

_PROJECTIONS = {
    "q_a_proj": "query_down",
    "kv_a_proj_with_mqa": "key_value_down",
    "kv_b_proj": "key_value",
    "o_proj": "output",
}
_NORMS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_a_layernorm": "attention.query_down_norm",
    "self_attn.kv_a_layernorm": "attention.key_value_down_norm",
    "post_attention_layernorm": "feed_forward_norm",
}
_ATTENTION = (
    *(
        TensorRule(f"model.layers.{{layer}}.{theirs}.weight", (f"layers.{own}.scale",))
        for theirs, own in _NORMS.items()
    ),
    *(
        TensorRule(
            f"model.layers.{{layer}}.self_attn.{theirs}.weight",
            (f"layers.attention.{own}.kernel",),
            transposed=True,
        )
        for theirs, own in _PROJECTIONS.items()
    ),
    *(
        TensorRule(
            f"model.layers.{{layer}}.self_attn.{theirs}.weight",
            ("layers.attention.query.kernel",),
            transposed=True,
            only_for=only_for,
        )
        for theirs, only_for in (
            ("q_b_proj", lambda model: model.q_lora_rank > 0),
            ("q_proj", lambda model: model.q_lora_rank == 0),
        )
    ),
)
_DENSE_LAYERS = tuple(
    rule._replace(leaves=tuple(f"embedding.dense_{leaf}" for leaf in rule.leaves))
    for rule in (*_ATTENTION, *FEED_FORWARD)
)
_EXPERTS = (
    TensorRule("model.layers.{layer}.mlp.gate.weight", ("layers.router.kernel",), transposed=True),
    TensorRule(
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        ("layers.router.score_bias",),
        wide=True,
    ),
    *(
        TensorRule(
            f"model.layers.{{layer}}.mlp.{theirs}.{name}_proj.weight",
            (f"layers.{own}.{name}.kernel",),
            transposed=True,
        )
        for theirs, own in (
            ("experts.{expert}", "experts"),
            ("shared_experts", "shared_experts"),
        )
        for name in ("gate", "up", "down")
    ),
)
_LATER_TOKENS = (
    *(
        TensorRule(f"model.layers.{{layer}}.{theirs}.weight", (f"mtp.{own}.scale",))
        for theirs, own in (
            ("enorm", "embedding_norm"),
            ("hnorm", "stream_norm"),
            ("shared_head.norm", "final_norm"),
        )
    ),
    TensorRule("model.layers.{layer}.eh_proj.weight", ("mtp.projection.kernel",), transposed=True),
    *(
        rule._replace(leaves=tuple(f"mtp.{leaf}" for leaf in rule.leaves))
        for rule in (*_ATTENTION, *_EXPERTS)
    ),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys=(
        *(key for key in SIZES if key.name != "head_dim"),
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), None),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 4096),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-6),
        ConfigKey(
            "q_lora_rank", ("q_lora_rank",), 1536, write=lambda model: model.q_lora_rank or None
        ),
        ConfigKey("kv_lora_rank", ("kv_lora_rank",), 512),
        ConfigKey("qk_nope_head_dim", ("qk_nope_head_dim",), 128),
        ConfigKey("qk_rope_head_dim", ("qk_rope_head_dim",), 64),
        ConfigKey("v_head_dim", ("v_head_dim",), 128),
        ConfigKey("rope_interleave", ("rope_interleave",), True),
        ConfigKey("first_k_dense_replace", ("first_k_dense_replace",), 3),
        ConfigKey("n_routed_experts", ("num_experts",), 256, alias="num_local_experts"),
        ConfigKey("num_experts_per_tok", ("num_experts_per_tok",), 8),
        ConfigKey("moe_intermediate_size", ("moe_intermediate_size",), 2048),
        ConfigKey("n_shared_experts", ("n_shared_experts",), 1),
        ConfigKey("norm_topk_prob", ("norm_topk_prob",), True),
        ConfigKey("routed_scaling_factor", ("routed_scaling_factor",), 2.5),
        ConfigKey("n_group", ("n_group",), 8),
        ConfigKey("topk_group", ("topk_group",), 4),
        ConfigKey("aux_loss_alpha", ("router_aux_loss_coef",), 0.0),
        ConfigKey("num_nextn_predict_layers", ("num_nextn_predict_layers",), 0),
    ),
    implied=SWIGLU | {"scoring_func": "sigmoid", "use_router_bias": True},
    # transformers takes the last three for granted; DeepSeek's own code and vLLM read them.
    fixed=SILU
    | {
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    rates=ATTENTION_DROPOUT,
    ignored_keys=frozenset({"ep_size", "head_dim", "pretraining_tp", "qk_head_dim", "seq_aux"}),
    tensors=(*EMBEDDING_AND_HEAD, *_DENSE_LAYERS, *_ATTENTION, *_EXPERTS, *_LATER_TOKENS),
    copies={
        "model.layers.{layer}.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.{layer}.shared_head.head.weight": "lm_head.weight",
    },
)

KIMI_K2 = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2")
"""The same architecture by another name; it is written as `deepseek_v3`."""
