"""Errors of a Hugging Face checkpoint: each one line that names the file and what is wrong."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from model_families import FAMILIES
from safetensors.numpy import load_file, save_file

from geojax.errors import UserError
from geojax.models import ModelConfig, init_parameters, parameter_shapes
from geojax.models.huggingface import (
    CheckpointWriter,
    HuggingFaceWeights,
    family_for,
    other_settings,
    read_model_fields,
    write_adapter,
)
from geojax.models.huggingface.families import GEMMA3
from geojax.named_arrays import leaves_by_name

MODEL = FAMILIES["llama"]
KEY = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def leaves():
    return leaves_by_name(init_parameters(MODEL, jax.random.key(0)))


@pytest.fixture
def folder(tmp_path, leaves):
    """A checkpoint of one file."""
    write(tmp_path, leaves)
    return tmp_path


def write(folder, leaves, **options):
    with CheckpointWriter(folder, MODEL, dtype="bfloat16", token_ids={}, **options) as writer:
        for name in writer.leaves:
            writer.put(name, tuple(map(np.arange, leaves[name].shape)), np.asarray(leaves[name]))


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_part_is_read_as_it_was_written(folder, leaves):
    weights = HuggingFaceWeights(folder, MODEL)
    weights.check_headers()
    read = weights.read("layers.attention.key.kernel", (1,), (slice(3, 7), slice(2, 9)))
    written = np.asarray(leaves["layers.attention.key.kernel"][1, 3:7, 2:9])
    assert read.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read, written.astype(ml_dtypes.bfloat16))
    assert ModelConfig(**read_model_fields(folder)) == MODEL


def test_settings_that_the_weights_were_not_trained_with_are_named(folder):
    longer = MODEL.replace(max_position_embeddings=512, dropout=0.1)
    assert other_settings(folder, longer) == []
    other = longer.replace(rope_parameters={"rope_theta": 5e5}, rms_norm_eps=1e-6)
    assert other_settings(folder, other) == ["rms_norm_eps", "rope_parameters"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "falcon"}, "model_type 'falcon' is not carried; llama, qwen2, .* are"),
        ({"hidden_size": None}, "hidden_size is required and missing"),
        ({"logit_scale": 8}, "logit_scale is no key that geojax knows of model_type llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not carried; 'silu' would be"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not carried; 0.0 would be"),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window True is not carried; False would be",
        ),
        ({"rope_scaling": {"a": {}}}, "rope_parameters must be one mapping for all layers"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantized weights \(quantization_config\) .*; convert the checkpoint to bfloat16",
        ),
    ],
)
def test_a_config_that_is_not_carried_is_refused(folder, changes, message):
    change_json(folder / "config.json", **changes)
    with pytest.raises(UserError, match=f"^{folder}/config.json: {message}"):
        read_model_fields(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(KEY), f"lacks {KEY}, which the model has$"),
        (
            lambda tensors: tensors.update(visual=tensors[KEY], score=tensors[KEY]),
            "holds score and 1 more tensors, which the model has not$",
        ),
        (
            lambda tensors: tensors.update({KEY: tensors[KEY].T.copy()}),
            rf"{KEY} has shape \[24, 16\], and the model's is \[16, 24\]$",
        ),
        (
            lambda tensors: tensors.update({KEY: tensors[KEY].astype(np.int8)}),
            f"{KEY} has dtype I8; BF16, F16, F32, F64 would do$",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_tensors_that_are_not_the_models_are_refused(folder, change, message):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UserError, match=f"^{path}: {message}"):
        HuggingFaceWeights(folder, MODEL).check_headers()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({KEY: "../model.safetensors"}, f'{KEY} is in "../model.safetensors"; the name of a file'),
        ({KEY: "/etc/passwd"}, f'{KEY} is in "/etc/passwd"; the name of a file beside'),
        ({KEY: ".."}, f'{KEY} is in "..";'),
        ({KEY: 3}, f"{KEY} is in 3;"),
    ],
)
def test_an_index_names_files_in_its_folder_only(tmp_path, leaves, change, message):
    write(tmp_path, leaves, file_bytes=5000)
    path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    HuggingFaceWeights(tmp_path, MODEL).check_headers()
    change_json(path, weight_map=weight_map | change)
    with pytest.raises(UserError, match=f"^{path}: {message}"):
        HuggingFaceWeights(tmp_path, MODEL)


def test_an_index_that_is_wrong_about_a_file_is_refused(tmp_path, leaves):
    write(tmp_path, leaves, file_bytes=5000)
    path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    other = weight_map["lm_head.weight"]
    change_json(path, weight_map=weight_map | {KEY: other})
    with pytest.raises(UserError, match=f"^{tmp_path / other}: lacks {KEY}, which"):
        HuggingFaceWeights(tmp_path, MODEL).check_headers()
    change_json(path, weight_map=weight_map | {KEY: "gone.safetensors"})
    with pytest.raises(UserError, match=r"gone.safetensors: cannot be read \(No such file"):
        HuggingFaceWeights(tmp_path, MODEL).check_headers()


def test_weights_of_another_model_are_refused(folder):
    with pytest.raises(UserError, match=r"config.json: model_type llama cannot .* qkv_bias=True"):
        HuggingFaceWeights(folder, MODEL.replace(qkv_bias=True))
    change_json(folder / "config.json", model_type="mixtral")
    with pytest.raises(UserError, match=r"cannot have the model's layers.feed_forward.down.kernel"):
        HuggingFaceWeights(folder, MODEL)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "auto_map": {},
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""The `config.json` of DeepSeek-V3 as published, without its quantization."""
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"]
    | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA3_27B = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
}

GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize(
    ("content", "preset", "model_type"),
    [
        (DEEPSEEK_V3, "deepseek-v3-671b", "deepseek_v3"),
        (KIMI_K2, "kimi-k2-1t", "deepseek_v3"),
        (GEMMA3_1B, "gemma3-1b", "gemma3_text"),
        (GEMMA3_27B, "gemma3-27b", "gemma3_text"),
        (GPT_OSS_20B, "gpt-oss-20b", "gpt_oss"),
    ],
)
def test_published_configs_are_the_presets(tmp_path, content, preset, model_type):
    (tmp_path / "config.json").write_text(json.dumps(content))
    wanted = ModelConfig.load(preset)
    found = ModelConfig(**read_model_fields(tmp_path))
    trained = ("initializer_range", "router_aux_loss_coef", "num_nextn_predict_layers")
    assert found.num_nextn_predict_layers == content.get("num_nextn_predict_layers", 0)
    assert found == wanted.replace(**{name: getattr(found, name) for name in trained})
    assert family_for(wanted).model_type == model_type


def test_the_text_model_is_read_beside_a_vision_encoder(tmp_path):
    preset = ModelConfig.load("gemma3-1b")
    model = preset.replace(
        **dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 8),
        **{"num_hidden_layers": 6, "vocab_size": 37},
    )
    generator = np.random.default_rng(0)
    shapes = leaves_by_name(parameter_shapes(model))
    leaves = {name: generator.random(leaf.shape, np.float32) for name, leaf in shapes.items()}
    with CheckpointWriter(tmp_path, model, dtype="float32", token_ids={}) as writer:
        for name in writer.leaves:
            writer.put(name, tuple(map(np.arange, leaves[name].shape)), leaves[name])
    path = tmp_path / "model.safetensors"
    parts = {f"language_model.{name}": array for name, array in load_file(path).items()}
    save_file(parts | {"vision_tower.post_layernorm.bias": np.zeros(3, np.float32)}, path)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert ModelConfig(**read_model_fields(tmp_path)) == model
    weights = HuggingFaceWeights(tmp_path, model)
    weights.check_headers()
    for name, leaf in leaves.items():
        stacked = weights.stacked_dims[name]
        slices = tuple(map(slice, (0,) * (leaf.ndim - stacked), leaf.shape[stacked:]))
        for stack in np.ndindex(leaf.shape[:stacked]):
            np.testing.assert_array_equal(weights.read(name, stack, slices), leaf[stack])


def test_an_adapter_beside_a_vision_encoder_is_refused(tmp_path):
    model = MODEL.replace(lora={})
    with pytest.raises(UserError, match=r"more than the text model of gemma3, .* --adapter"):
        write_adapter(tmp_path, GEMMA3, model, {}, dtype="float32", base=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "config.json: text_config is required and must be a mapping"),
        (
            {"text_config": GEMMA3_27B["text_config"] | {"hidden_sise": 5}},
            "config.json: text_config: hidden_sise is no key that geojax knows",
        ),
        ({"quantization_config": {"bits": 4}}, "config.json: quantized weights"),
    ],
)
def test_mistakes_in_a_nested_config_are_named(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_27B | changes))
    with pytest.raises(UserError, match=re.escape(message)):
        read_model_fields(tmp_path)


def test_a_scaling_that_transformers_takes_for_granted_is_told(tmp_path):
    scaled, path = ModelConfig.load("gpt-oss-20b"), tmp_path / "config.json"
    for model in (scaled, scaled.replace(rope_parameters={"rope_theta": 1e6})):
        path.write_text(json.dumps(family_for(model).write_config(model)))
        assert ModelConfig(**read_model_fields(tmp_path)) == model
    change_json(path, rope_scaling=None, rope_theta=150_000)
    assert ModelConfig(**read_model_fields(tmp_path)) == scaled


def test_the_family_of_a_model_is_the_first_that_can_express_it():
    found = {name: family_for(FAMILIES[name]).model_type for name in ("llama", "nemotron", "gpt3")}
    assert found == {"llama": "llama", "nemotron": "nemotron", "gpt3": "gpt2"}
    assert family_for(MODEL.replace(qkv_bias=True)).model_type == "qwen2"
    assert family_for(MODEL.replace(use_qk_norm=True)).model_type == "qwen3"
    with pytest.raises(UserError, match=r"of no family .*: not llama \(hidden_act=relu2\), qwen2"):
        family_for(MODEL.replace(hidden_act="relu2", norm="rmsnorm"))
