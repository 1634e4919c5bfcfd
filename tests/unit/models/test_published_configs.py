"""Published `config.json` files as they are: each read, or refused by the key's name."""

import json
import re
from pathlib import Path

import pytest

from geojax.errors import UserError
from geojax.models import ModelConfig, parameter_count
from geojax.models.huggingface.checkpoint import family_for, read_model_fields

FOLDER = Path(__file__).parents[2] / "data" / "published_configs"
BILLIONS = {
    "deepseek-r1-distill-qwen-1.5b": 1.777,
    "deepseek-v3": 671.026,
    "gemma-2-9b": 9.242,
    "gemma-3-1b": 1.0,
    "gemma-3-27b": 27.009,
    "gpt-oss-20b": 20.915,
    "gpt2": 0.124,
    "kimi-k2": 1026.408,
    "llama-3.1-8b": 8.030,
    "moonlight-16b-a3b": 15.960,
    "qwen2.5-7b": 7.616,
    "smollm2-1.7b": 1.711,
    "yarn-llama-2-7b-64k": 6.738,
}
"""Parameters of each model, as its page on the Hub counts them, but for encoders of images."""
PRESETS = {
    "deepseek-v3": "deepseek-v3-671b",
    "gemma-2-9b": "gemma2-9b",
    "gemma-3-1b": "gemma3-1b",
    "gemma-3-27b": "gemma3-27b",
    "gpt-oss-20b": "gpt-oss-20b",
    "kimi-k2": "kimi-k2-1t",
    "llama-3.1-8b": "llama3-8b",
}
WRITTEN_AS = {"gemma3": "gemma3_text", "kimi_k2": "deepseek_v3"}
"""Model types that are written as another one."""


def published(name):
    content = json.loads((FOLDER / f"{name}.json").read_text())
    if content.get("quantization_config", {}).get("quant_method") == "fp8":
        del content["quantization_config"]  # as the script of DeepSeek does that converts it
    return content


def read(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return ModelConfig(**read_model_fields(folder))


def test_each_file_is_known():
    assert {path.stem for path in FOLDER.iterdir()} == BILLIONS.keys()


@pytest.mark.parametrize("name", BILLIONS)
def test_a_published_config_is_read(tmp_path, name):
    content = published(name)
    model = read(tmp_path, content)
    without_copies = model.replace(num_nextn_predict_layers=0)
    assert parameter_count(without_copies) / 1e9 == pytest.approx(BILLIONS[name], abs=1e-3)
    family = family_for(model)
    assert family.model_type == WRITTEN_AS.get(content["model_type"], content["model_type"])
    assert read(tmp_path, family.write_config(model)) == model


@pytest.mark.parametrize("name", PRESETS)
def test_a_published_config_is_the_preset(tmp_path, name):
    content = published(name)
    found, wanted = read(tmp_path, content), ModelConfig.load(PRESETS[name])
    trained = ("initializer_range", "router_aux_loss_coef", "num_nextn_predict_layers")
    assert found.num_nextn_predict_layers == content.get("num_nextn_predict_layers", 0)
    assert found == wanted.replace(**{each: getattr(found, each) for each in trained})


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2"])
def test_numbers_of_8_bits_are_refused_by_the_key(tmp_path, name):
    content = json.loads((FOLDER / f"{name}.json").read_text())
    with pytest.raises(UserError, match=r"quantized weights \(quantization_config\) .* bfloat16$"):
        read(tmp_path, content)


def test_latents_are_normed_as_transformers_does(tmp_path):
    model = read(tmp_path, published("moonlight-16b-a3b"))
    assert (model.rms_norm_eps, model.latent_norm_eps) == (1e-5, 1e-6)
    with pytest.raises(UserError, match=r"deepseek_v3, cannot have latent_norm_eps=1e-05$"):
        family_for(model.replace(latent_norm_eps=1e-5))


def test_yarn_begins_where_the_file_ends_if_it_does_not_tell(tmp_path):
    content = published("yarn-llama-2-7b-64k")
    scaling = {"factor": 16.0, "rope_type": "yarn"}
    model = read(tmp_path, content | {"rope_scaling": scaling})
    assert model.rope_parameters.original_max_position_embeddings == 65536


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-2-9b", "gemma-3-1b"])
def test_a_window_that_no_layer_has_is_left(tmp_path, name):
    content = published(name)
    layers = content["num_hidden_layers"]
    model = read(tmp_path, content | {"layer_types": ["full_attention"] * layers})
    assert (model.sliding_window, model.rope_local_base_freq) == (None, None)
    written = family_for(model).write_config(model)
    assert written["sliding_window"] > 0, "transformers fails on null"
    assert read(tmp_path, written) == model


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma-2-9b", {"sliding_window_size": 5}, "sliding_window and sliding_window_size must"),
        ("gemma-2-9b", {"sliding_window_pattern": 3}, "sliding_window_pattern 3 is not carried; 2"),
        ("gemma-3-1b", {"rope_local_base_freq": None}, "rope_local_base_freq is null; remove it"),
        ("gemma-3-1b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not"),
        ("gpt-oss-20b", {"swiglu_limit": None}, "swiglu_limit is null; remove it"),
        ("qwen2.5-7b", {"use_mrope": True}, "use_mrope True is not carried; False would be"),
        (
            "gemma-3-1b",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"partial_rotary_factor": 0.5},
                }
            },
            "partial_rotary_factor 0.5 in layers with a window is not carried; 1.0 would be",
        ),
        (
            "gemma-3-1b",
            {"rope_parameters": "full_attention"},
            "rope_parameters must be one mapping for all layers",
        ),
        ("gemma-3-27b", {"text_config": None}, "text_config is required and must be a mapping"),
        (
            "gemma-3-27b",
            {"text_config": {"hidden_sise": 5}},
            "text_config: hidden_sise is no key that geojax knows",
        ),
        ("gemma-3-27b", {"quantization_config": {"bits": 4}}, "quantized weights"),
    ],
)
def test_a_value_that_is_not_carried_is_refused(tmp_path, name, changes, message):
    with pytest.raises(UserError, match=f"config.json: {re.escape(message)}"):
        read(tmp_path, published(name) | changes)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("deepseek_v2", "the nearest that is, deepseek_v3, differs: its router has softmax scores"),
        ("gemma", "the nearest that is, gemma2, differs: it has no norms behind blocks"),
        ("starcoder2", "the nearest that is, llama, differs: it has LayerNorm"),
        ("qwen3_mo", "deepseek_v3, .* are; did you mean 'qwen3_moe'?"),
        ("x" * 1000, "deepseek_v3, kimi_k2"),
        (["llama"], "deepseek_v3, kimi_k2"),
    ],
)
def test_a_type_that_is_not_carried_names_the_nearest(tmp_path, model_type, message):
    with pytest.raises(UserError, match=f"is not carried; {message}") as error:
        read(tmp_path, {"model_type": model_type})
    assert len(str(error.value).replace(str(tmp_path), "")) < 350
