import pytest

from geojax.errors import UserError
from geojax.models import ModelConfig, parameter_shapes
from geojax.settings import validate

_VALID = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_SIGMOID = {"scoring_func": "sigmoid"}
_LATENTS = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}


def test_loads_a_preset_and_a_file(tmp_path):
    preset = ModelConfig.load("llama3-8b")
    assert (preset.num_key_value_heads, preset.head_dim, preset.rotary_dim) == (8, 128, 128)
    assert preset.rope_parameters.rope_type == "llama3"
    assert preset.rope_parameters.factor == 8
    assert ModelConfig.load("nemotron4-15b").rotary_dim == 64

    path = tmp_path / "small.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in _VALID.items()))
    loaded = ModelConfig.load(path)
    assert loaded == ModelConfig.load(str(path)) == ModelConfig(**_VALID)
    assert loaded.num_key_value_heads == 4
    assert hash(loaded) == hash(ModelConfig(**_VALID))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_attention_heads": 5},
            "hidden_size 32 is not a multiple of num_attention_heads 5; choose",
        ),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3; .* can be 1, 2, 4"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.4}},
            "0.4 of a head of 8 dims is 3.2 dims; .* must be even",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.375}},
            "is 3 dims; rotary positions rotate pairs",
        ),
        (
            {
                "position_embedding_type": "learned_absolute",
                "rope_parameters": {"partial_rotary_factor": 0.5},
            },
            "rope_parameters requires position_embedding_type=rope; got",
        ),
        (
            {"use_qk_norm": True, "norm": "layernorm"},
            "use_qk_norm requires norm=rmsnorm; got layernorm",
        ),
        (
            {"swiglu_limit": 7.0, "hidden_act": "relu2"},
            "swiglu_limit requires hidden_act=silu and gated=true; got relu2 and false",
        ),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha requires swiglu_limit"),
        ({"moe_bias": True}, "moe_bias requires num_experts"),
        (
            {"sandwich_norm": True, "num_experts": 2, "num_experts_per_tok": 1},
            "sandwich_norm requires a dense model",
        ),
        ({"rope_local_base_freq": 100.0}, "rope_local_base_freq requires sliding_window"),
        (
            {"layer_types": ("sliding_attention",)},
            "layer_types with sliding_attention requires sliding_window; set it",
        ),
        (
            {"sliding_window": 8, "layer_types": ("full_attention",)},
            "sliding_window requires a layer of the type sliding_attention",
        ),
        (
            {"sliding_window": 8, "layer_types": ("sliding_attention",) * 3},
            "layer_types: has 3 entries for 2 layers",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers: input should be greater than 0, not 0"),
        ({"dropout": 1.0}, "dropout: input should be less than 1"),
        (
            {"norm": "batchnorm"},
            "norm: input should be 'layernorm', 'rmsnorm', 'layernorm1p' or 'rmsnorm1p'",
        ),
        ({"head": 5}, "head: unknown key; did you mean 'head_dim'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type llama3 needs factor"),
        ({"rope_parameters": {"factor": 8}}, "rope_type default takes no factor"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8, "beta_fast": 32}},
            "rope_type linear takes no beta_fast",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8}}, "rope_type yarn needs original_"),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                    "original_max_position_embeddings": 8192,
                }
            },
            "rope_parameters: high_freq_factor 1 must be above low_freq_factor 4",
        ),
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok 5 .*; it can be 1 to 4",
        ),
        ({"num_experts": 4}, "num_experts_per_tok 0 does not fit num_experts 4; it can be 1 to 4"),
        ({"n_shared_experts": 2}, "n_shared_experts requires num_experts"),
        ({"first_k_dense_replace": 1}, "first_k_dense_replace requires num_experts"),
        (_EXPERTS | {"first_k_dense_replace": 2}, "first_k_dense_replace 2 must be below num_hid"),
        (_EXPERTS | {"n_group": 2}, "n_group 2 requires scoring_func=sigmoid; got softmax"),
        (_EXPERTS | _SIGMOID | {"n_group": 4}, "n_group 4 must divide num_experts 4 into groups"),
        (
            _EXPERTS | _SIGMOID | {"n_group": 2, "num_experts_per_tok": 3},
            "topk_group 1 of 2 groups of 2 experts must hold num_experts_per_tok 3",
        ),
        ({"latent_norm_eps": 1e-5}, "latent_norm_eps requires kv_lora_rank; remove latent_norm"),
        ({"lora": {"rank": 33}}, "lora.rank 33 must be at most hidden_size"),
        ({"lora": {"target_modules": ["q_proj", "q_proj"]}}, "names q_proj twice; once would do"),
        ({"initializer_range": 1.5}, "input should be less than or equal to 1"),
        ({"q_lora_rank": 8}, "q_lora_rank requires kv_lora_rank; remove q_lora_rank, or set both"),
        ({"v_head_dim": 4}, "v_head_dim 4 other than head_dim 8 requires kv_lora_rank"),
        (
            _LATENTS | {"qk_nope_head_dim": 0},
            r"latent attention \(kv_lora_rank\) needs qk_nope_head_dim",
        ),
        (
            _LATENTS | {"head_dim": 8},
            r"head_dim 8 must be qk_nope_head_dim \+ qk_rope_head_dim = 6",
        ),
        (
            _LATENTS | {"num_key_value_heads": 2},
            "num_key_value_heads 2 must be num_attention_heads",
        ),
        (_LATENTS | {"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 must be even"),
        (_LATENTS | {"use_qk_norm": True}, "latent attention .* requires use_qk_norm=false"),
    ],
)
def test_refuses_in_one_line(change, message):
    with pytest.raises(UserError, match=message) as refusal:
        validate(ModelConfig, _VALID | change, "model")
    assert "\n" not in str(refusal.value)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'llama3-8b'"):
        ModelConfig.load("llama3-8")


def test_defaults_that_depend_on_other_sizes_are_resolved():
    config = ModelConfig(**_VALID)
    assert (config.head_dim, config.num_key_value_heads, config.moe_intermediate_size) == (8, 4, 64)
    wider = config.replace(num_attention_heads=8, hidden_size=48, intermediate_size=96)
    assert (wider.head_dim, wider.num_key_value_heads, wider.moe_intermediate_size) == (6, 8, 96)
    given = ModelConfig(**_VALID, head_dim=16, num_key_value_heads=2)
    assert given.replace(hidden_size=64).head_dim == 16


def test_each_projection_has_a_bias_of_its_own():
    def biases(**changes):
        layers = parameter_shapes(ModelConfig(**_VALID | changes))["layers"]
        blocks = layers["attention"] | layers["feed_forward"]
        return {name for name, block in blocks.items() if "bias" in block}

    assert biases() == set()
    assert biases(qkv_bias=True) == {"query", "key", "value"}
    assert biases(attention_output_bias=True) == {"output"}
    assert biases(mlp_bias=True) == {"gate", "up", "down"}


def test_kinds_of_layers_repeat_and_are_kept_as_the_shortest_period():
    sliding, full = "sliding_attention", "full_attention"
    sizes = _VALID | {"num_hidden_layers": 5}
    alike = ModelConfig(**sizes, sliding_window=4)
    assert alike == ModelConfig(**sizes, sliding_window=4, layer_types=[sliding] * 5)
    assert alike.layer_types == (sliding,)
    mixed = ModelConfig(
        **sizes, sliding_window=4, layer_types=[sliding, sliding, full, sliding, sliding]
    )
    assert mixed.layer_types == (sliding, sliding, full)
    assert mixed.replace(num_hidden_layers=7).has_window == (True, True, False)
    assert ModelConfig(**sizes).layer_types == (full,)
