"""Folders of Hugging Face: a `config.json` of every family, and the safetensors files beside it."""

import functools
import json
import random
from typing import Any

import numpy as np
import safetensors.numpy

from fuzz.case import KINDS, Case
from fuzz.corpus import Corpus
from fuzz.damage import JSON_VALUES, flipped, harm
from geojax.models.families import FAMILIES
from geojax.models.huggingface.checkpoint import model_of
from geojax.models.huggingface.family import NEUTRAL_KEYS, Family
from geojax.models.huggingface.tensor_map import TensorMap
from geojax.models.huggingface.weight_files import INDEX, SINGLE

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
_HEADS = {"head_dim": 8}
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": _HEADS,
    "mistral": {"sliding_window": 8},
    "ministral": _HEADS
    | {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "deepseek_v3": {
        "q_lora_rank": 6,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 8,
    },
    "gemma2": _HEADS | {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "gemma3_text": _HEADS | {"query_pre_attn_scalar": 8, "sliding_window": 8},
    "gpt_oss": _HEADS | {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": _HEADS,
    "gpt2": {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": 320,
        "n_positions": 64,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
}
_OF_FAMILY["kimi_k2"] = _OF_FAMILY["deepseek_v3"]


def family_config(family: Family) -> dict[str, Any]:
    """Return the `config.json` of a small model of a family."""
    if family.nested_in is not None:
        (text,) = (each for each in FAMILIES if each.model_type == f"{family.model_type}_text")
        return {"model_type": family.model_type, family.nested_in: family_config(text)}
    sizes = _SIZES if family.model_type != "gpt2" else {}
    return {"model_type": family.model_type, **sizes, **_OF_FAMILY.get(family.model_type, {})}


@functools.cache
def _tensors(model_type: str) -> dict[str, np.ndarray]:
    (family,) = (each for each in FAMILIES if each.model_type == model_type)
    content = family_config(family)
    model = model_of(family.read_config(content, "config.json"))
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(0, 0.02, tensor.shape).astype(np.float32)
        for name, tensor in TensorMap(family, model).tensors.items()
    }


def weights(corpus: Corpus, rng: random.Random) -> Case:
    """A folder of a small model with one thing wrong, or two."""
    family = rng.choice(FAMILIES)
    content = family_config(family)
    text = content if family.nested_in is None else content[family.nested_in]
    tensors = dict(_tensors(family.model_type))
    damages = rng.choices(["key", "tensor", "value", "file", "head", "index", "none"], k=2)
    for damage in damages[: rng.choice([1, 1, 2])]:
        if damage == "key":
            _harm_config(family, text, rng)
        elif damage == "tensor":
            _harm_tensors(tensors, rng)
        elif damage == "value":
            name = rng.choice(list(tensors))
            changed = tensors[name].copy()
            changed.flat[rng.randrange(changed.size)] = rng.choice([np.nan, np.inf, -np.inf, 1e38])
            tensors[name] = changed
        elif damage == "head":
            text["tie_word_embeddings"] = not text.get("tie_word_embeddings", False)
    case = _case(corpus, content, tensors, split="index" in damages, rng=rng)
    is_read = any(word.startswith("--initial_weights") for word in case.arguments)
    case.must_be_refused = is_read and any(
        not np.isfinite(array).all() for array in tensors.values() if array.dtype == np.float32
    )
    if "file" in damages:
        harm(case, rng.choice([name for name in case.files if name.startswith("hf/")]), rng)
    return case


def _case(
    corpus: Corpus,
    content: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    split: bool,
    rng: random.Random,
) -> Case:
    files = {"small.yaml": corpus.configs["small.yaml"]}
    files["hf/config.json"] = json.dumps(content).encode()
    if split and tensors:
        names = sorted(tensors)
        halves = names[::2], names[1::2]
        weight_map = {}
        for number, half in enumerate(halves, 1):
            file = f"model-{number:05}-of-00002.safetensors"
            files[f"hf/{file}"] = safetensors.numpy.save({name: tensors[name] for name in half})
            weight_map |= dict.fromkeys(half, file)
        if rng.random() < 0.5:
            weight_map[rng.choice(names)] = rng.choice(
                ["../x", "/dev/zero", "fifo", "", None, 3, "model-00003-of-00002.safetensors", "hf"]
            )
        files[f"hf/{INDEX}"] = json.dumps({"weight_map": weight_map}).encode()
    else:
        files[f"hf/{SINGLE}"] = safetensors.numpy.save(tensors)
    words = ["train", "small.yaml", "--model={huggingface: ./hf}"]
    words += rng.choice([*[["--initial_weights=hf"]] * 4, ["--initial_weights=./hf/"], []])
    words += ["--mesh={dc: 1}", "--topology=null", "--simulate_devices=1"]
    if rng.random() < 0.15:
        words.append("--model.lora={rank: 2}")
    return Case(words, files, writes=("run",))


def _harm_config(family: Family, text: dict[str, Any], rng: random.Random) -> None:
    """Give a key of the family, or of any, a value that it may not have."""
    names = [key.name for key in family.keys] + list(family.fixed) + sorted(family.ignored_keys)
    names += [*sorted(NEUTRAL_KEYS), "rope_theta", "rope_scaling", "rope_parameters"]
    names += ["partial_rotary_factor", "quantization_config", "tie_word_embeddings", "auto_map"]
    name = rng.choice([*names, *text])
    if rng.random() < 0.15:
        text.pop(name, None)
        return
    text[name] = rng.choice(
        [
            *JSON_VALUES,
            {"rope_type": "yarn", "factor": 4.0},
            {"rope_type": "llama3", "factor": 0, "original_max_position_embeddings": 16},
            {"rope_type": "linear", "factor": float("nan")},
            {"type": "dynamic", "factor": 2},
            {"full_attention": {"rope_theta": "x"}, "sliding_attention": None},
            {"quant_method": "mxfp4"},
            ["sliding_attention"] * 7,
            ["full_attention", 3],
            2**40,
            -(2**40),
            1.5,
        ]
    )


def _harm_tensors(tensors: dict[str, np.ndarray], rng: random.Random) -> None:
    """Take a tensor away, add one, or give one another shape or type."""
    name = rng.choice(list(tensors))
    array = tensors.pop(name)
    choice = rng.choice(["away", "name", "shape", "type", "head", "empty"])
    if choice == "name":
        tensors[rng.choice([f"{name}x", "", "x" * 3000, "a\nb"])] = array
    elif choice == "shape":
        tensors[name] = np.zeros(rng.choice([(1,), array.shape[::-1], (*array.shape, 1)]), "f4")
    elif choice == "type":
        tensors[name] = array.astype(rng.choice(["i8", "f8", "f2", "u1", "?"]))
    elif choice == "empty":
        tensors[name] = np.zeros((0, *array.shape[1:]), np.float32)
    elif choice == "head":
        tensors[name] = array
        tensors["lm_head.weight"] = np.ones((320, 16), np.float32)


def kinds_of_files(corpus: Corpus, rng: random.Random) -> Case:
    """A fifo, a folder, a link that leads nowhere, or bytes of chance in place of a file."""
    family = rng.choice(FAMILIES)
    tensors = _tensors(family.model_type)
    case = _case(corpus, family_config(family), tensors, split=rng.random() < 0.5, rng=rng)
    name = rng.choice([name for name in case.files if name.startswith("hf/")])
    if rng.random() < 0.6:
        case.kinds[name] = rng.choice(KINDS)
    else:
        case.files[name] = flipped(case.files[name], rng)
    return case


DRAWS = ((4, weights), (1, kinds_of_files))
