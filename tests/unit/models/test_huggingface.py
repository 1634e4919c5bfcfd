"""Errors of a Hugging Face checkpoint: each one line that names the file and what is wrong."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from model_families import FAMILIES
from safetensors.numpy import load_file, save_file

from geojax.errors import UserError
from geojax.models import ModelConfig, init_parameters, parameter_shapes
from geojax.models.families.gemma import GEMMA3
from geojax.models.huggingface.adapter import write_adapter
from geojax.models.huggingface.checkpoint import (
    HuggingFaceWeights,
    family_for,
    other_settings,
    read_model_fields,
)
from geojax.models.huggingface.write import CheckpointWriter
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
    weights.check()
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
        (
            {"model_type": "nanogpt"},
            "model_type 'nanogpt' is not carried; .* llama, .* are",
        ),
        ({"hidden_size": None}, "hidden_size is required and missing"),
        ({"logit_scale": 8}, "logit_scale is no key that geojax knows of model_type llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not carried; 'silu' would be"),
        ({"hidden_act": None}, "hidden_act None is not carried; 'silu' would be"),
        ({"rms_norm_eps": None}, "rms_norm_eps is null; remove it, or give its value"),
        ({"attention_dropout": 1.5}, "attention_dropout 1.5 is no rate; a number below 1 would do"),
        ({"torch_dtype": 5}, "torch_dtype is 5; the name of a dtype would do"),
        (
            {"eos_token_id": []},
            r"eos_token_id is \[\]; a token's number, or a list of them, would do",
        ),
        ({"eos_token_id": {}}, "eos_token_id is {}; a token's number"),
        ({"eos_token_id": "a\nb"}, r"eos_token_id is 'a\\nb'; a token's number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not carried: transformers"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": None},
            "partial_rotary_factor 0.5 is not carried: transformers",
        ),
        ({"rope_interleaved": True}, "rope_interleaved True is not carried; False would be"),
        (
            {"model_type": "gemma2", "sliding_window_pattern": 3, "hidden_act": "gelu"},
            "sliding_window_pattern 3 is not carried; 2 would be",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0, "hidden_act": "gelu"},
            "attn_logit_softcapping 50.0 is not carried; None would be",
        ),
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
        HuggingFaceWeights(folder, MODEL).check()


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
    HuggingFaceWeights(tmp_path, MODEL).check()
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
        HuggingFaceWeights(tmp_path, MODEL).check()
    change_json(path, weight_map=weight_map | {KEY: "gone.safetensors"})
    with pytest.raises(UserError, match=r"gone.safetensors: cannot be read \(No such file"):
        HuggingFaceWeights(tmp_path, MODEL).check()


def test_weights_of_another_model_are_refused(folder):
    with pytest.raises(UserError, match=r"config.json: model_type llama cannot .* qkv_bias=True"):
        HuggingFaceWeights(folder, MODEL.replace(qkv_bias=True))
    change_json(folder / "config.json", model_type="mixtral")
    with pytest.raises(UserError, match=r"cannot have the model's layers.feed_forward.down.kernel"):
        HuggingFaceWeights(folder, MODEL)


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
    weights.check()
    for name, leaf in leaves.items():
        stacked = weights.stacked_dims[name]
        slices = tuple(map(slice, (0,) * (leaf.ndim - stacked), leaf.shape[stacked:]))
        for stack in np.ndindex(leaf.shape[:stacked]):
            np.testing.assert_array_equal(weights.read(name, stack, slices), leaf[stack])


def test_an_adapter_beside_a_vision_encoder_is_refused(tmp_path):
    model = MODEL.replace(lora={})
    with pytest.raises(UserError, match=r"more than the text model of gemma3, .* --adapter"):
        write_adapter(tmp_path, GEMMA3, model, {}, dtype="float32", base=tmp_path)


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
    with pytest.raises(
        UserError, match=r"of no family .* nearest, llama, cannot have hidden_act=relu2$"
    ):
        family_for(MODEL.replace(hidden_act="relu2", norm="rmsnorm"))
