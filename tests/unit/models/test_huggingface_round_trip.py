"""Drawn models of every family: what is written of one is read as the same."""

import collections
import json
import random

import pydantic
import pytest

from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.models.families import FAMILIES
from geojax.models.huggingface.checkpoint import family_for, model_of
from geojax.models.huggingface.family import TRAINING_FIELDS

DRAWS = 40
WINDOWS = [("sliding_attention",), ("full_attention",), ("sliding_attention", "full_attention")]
ROPES = [
    {},
    {"rope_theta": 500.0},
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.9,
        "mscale_all_dim": 0.7,
    },
]
CHOICES = {
    "num_hidden_layers": [2, 3, 4],
    "hidden_size": [24],
    "num_attention_heads": [4],
    "num_key_value_heads": [1, 2, 4],
    "q_lora_rank": [0, 14],
    "kv_lora_rank": [0, 10],
    "qk_nope_head_dim": [0, 6],
    "qk_rope_head_dim": [0, 4],
    "head_dim": [8, 10],
    "v_head_dim": [5, 8, 10],
    "intermediate_size": [40, 96],
    "vocab_size": [37],
    "max_position_embeddings": [64, 4096],
    "norm": ["layernorm", "rmsnorm", "layernorm1p", "rmsnorm1p"],
    "sandwich_norm": [False, True],
    "rms_norm_eps": [1e-5, 1e-6, 1e-4],
    "latent_norm_eps": [1e-6, 1e-5],
    "hidden_act": ["gelu_pytorch_tanh", "relu2", "silu"],
    "gated": [False, True],
    "swiglu_limit": [None, 7.0, 0.5],
    "swiglu_alpha": [1.702, 1.3],
    "position_embedding_type": ["learned_absolute", "rope"],
    "rope_parameters": ROPES,
    "rope_local_base_freq": [None, 10.0, 500.0, 10_000.0],
    "query_pre_attn_scalar": [6, 8, 256],
    "attn_logit_softcapping": [None, 50.0, 1.5],
    "sliding_window": [None, 3, 4096],
    "layer_types": WINDOWS,
    "rope_interleave": [False, True],
    "use_attention_sinks": [False, True],
    "qkv_bias": [False, True],
    "use_qk_norm": [False, True],
    "attention_output_bias": [False, True],
    "mlp_bias": [False, True],
    "tie_word_embeddings": [False, True],
    "scale_embeddings": [False, True],
    "final_logit_softcapping": [None, 30.0, 2.0],
    "z_loss_coef": [0.0, 0.1],
    "dropout": [0.0, 0.1],
    "initializer_range": [0.02, 0.2],
    "num_nextn_predict_layers": [0, 1],
    "mtp_loss_scaling_factor": [0.1, 0.3],
    "num_experts": [0, 4, 8],
    "first_k_dense_replace": [0, 1],
    "num_experts_per_tok": [0, 2],
    "moe_intermediate_size": [20, 40],
    "moe_bias": [False, True],
    "n_shared_experts": [0, 1],
    "scoring_func": ["softmax", "sigmoid"],
    "norm_topk_prob": [True, False],
    "routed_scaling_factor": [1.0, 2.5],
    "n_group": [1, 4],
    "topk_group": [1, 2],
    "use_router_bias": [False, True],
    "capacity_factor": [None, 1.0],
    "router_z_loss_coef": [0.0, 1e-3],
    "router_aux_loss_coef": [0.01, 0.001],
    "lora": [None, {"rank": 2}],
}
"""Values that are drawn of each field."""

LATENT = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4}
WINDOW = {"sliding_window": 3, "layer_types": ("sliding_attention", "full_attention")}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "use_router_bias": True}
BASES = {
    **dict.fromkeys(("deepseek_v3", "kimi_k2"), LATENT | EXPERTS | {"n_shared_experts": 1}),
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma3", "ministral"), WINDOW),
    "gpt_oss": WINDOW | {"num_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0},
    "mixtral": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
}
"""Fields beside those that a family implies."""


def draw(family, generator):
    """A valid model: the family's, some of its own keys drawn, and sometimes another field."""
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    needed = (*sizes, "vocab_size", "max_position_embeddings")
    of_keys = {field for key in family.keys for field in key.fields if field in CHOICES}
    own = sorted(of_keys | {"rope_parameters"})
    while True:
        fields = {name: generator.choice(CHOICES[name]) for name in needed}
        fields |= family.implied
        if generator.random() < 0.8:
            fields |= BASES.get(family.model_type, {})
        drawn = [name for name in own if name not in fields and generator.random() < 0.4]
        drawn += generator.sample(own, 1)
        if generator.random() < 0.3:
            drawn += generator.sample(sorted(CHOICES), generator.choice([1, 2]))
        fields |= {name: generator.choice(CHOICES[name]) for name in drawn}
        for first, *others in (key.fields for key in family.keys):
            fields |= {name: fields[first] for name in others if first in fields}
        try:
            given = {name: each for name, each in fields.items() if each is not None}
            return family.settings(**given)
        except pydantic.ValidationError:
            continue


def written(family, model):
    return json.loads(json.dumps(family.write_config(model)))


def told(model, family):
    """The fields of a model that a family tells: all but some that end with training."""
    keys = {field for key in family.keys for field in key.fields}
    unused = set() if model.is_moe else {"moe_intermediate_size", "norm_topk_prob"}
    left = (TRAINING_FIELDS | unused) - keys
    return {name: each for name, each in model if name not in left}


def test_every_field_is_drawn():
    assert CHOICES.keys() == ModelConfig.model_fields.keys()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_what_is_written_is_read_as_the_same_model(family):
    generator, counts = random.Random(family.model_type), collections.Counter()
    for _ in range(DRAWS):
        model = draw(family, generator)
        counts["expressed"] += family.unsupported_reason(model) is None
        if all(each.unsupported_reason(model) for each in FAMILIES):
            with pytest.raises(UserError, match="is of no family that transformers has; the near"):
                family_for(model)
            counts["refused"] += 1
            continue
        for each in FAMILIES:
            if each.nested_in is None and each.unsupported_reason(model) is None:
                content = written(each, model)
                found = model_of(each.read_config(content, "config.json"))
                assert told(found, each) == told(model, each), content
    assert counts["expressed"] >= DRAWS / 4, counts
    assert counts["refused"] >= 1, counts
