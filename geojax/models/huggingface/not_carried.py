"""Families of Hugging Face models that geojax does not carry, and the nearest that it does."""

from collections.abc import Collection
from typing import NamedTuple

from geojax.json_file import shown
from geojax.suggestions import nearest


class Nearest(NamedTuple):
    """The nearest family that is carried, and how another one differs from it."""

    model_type: str
    difference: str


_PARALLEL = "its attention and feed-forward blocks are parallel"
_LINEAR = "most of its layers have linear attention"
_MAMBA = "most of its layers have a state space in place of attention"
_VISION = "its text model lies beside a vision encoder; that model by itself would do"
_LAYERNORM = "it has LayerNorm with biases"

_NEAREST = {
    "bamba": Nearest("llama", _MAMBA),
    "bloom": Nearest("gpt2", "its positions are biases of the scores"),
    "cohere": Nearest("llama", _PARALLEL),
    "cohere2": Nearest("llama", _PARALLEL),
    "deepseek_v2": Nearest("deepseek_v3", "its router has softmax scores and no bias"),
    "deepseek_v32": Nearest("deepseek_v3", "its attention is sparse, chosen by an indexer"),
    "falcon": Nearest("llama", _PARALLEL),
    "falcon_h1": Nearest("llama", _MAMBA),
    "gemma": Nearest("gemma2", "it has no norms behind blocks"),
    "gemma3n": Nearest("gemma3_text", "its layers have embeddings of their own"),
    "glm4_moe": Nearest("qwen3_moe", "it rotates half of a head, and a bias chooses experts"),
    "gpt_neox": Nearest("gpt2", _PARALLEL),
    "gptj": Nearest("gpt2", _PARALLEL),
    "granite": Nearest("llama", "it multiplies embeddings, branches, scores and logits"),
    "granitemoe": Nearest("mixtral", "it multiplies embeddings, branches, scores and logits"),
    "jamba": Nearest("mixtral", _MAMBA),
    "llama4": Nearest("llama", _VISION),
    "llama4_text": Nearest("llama", "it has experts, and layers without positions"),
    "llava": Nearest("llama", _VISION),
    "ministral3": Nearest("mistral", "its queries are scaled by their positions"),
    "mistral3": Nearest("mistral", _VISION),
    "mllama": Nearest("llama", _VISION),
    "nemotron_h": Nearest("nemotron", _MAMBA),
    "olmo": Nearest("llama", "its norms have no scale"),
    "olmo3": Nearest("mistral", "its norms lie behind the blocks alone"),
    "olmoe": Nearest("qwen3_moe", "it norms all heads of queries and keys together"),
    "opt": Nearest("gpt2", "its activation is ReLU, and its positions begin at 2"),
    "phi": Nearest("llama", _PARALLEL),
    "phimoe": Nearest("mixtral", _LAYERNORM),
    "qwen2_5_vl": Nearest("qwen2", _VISION),
    "qwen2_moe": Nearest("qwen3_moe", "its shared expert has a gate"),
    "qwen2_vl": Nearest("qwen2", _VISION),
    "qwen3_5": Nearest("qwen3", _LINEAR),
    "qwen3_5_moe": Nearest("qwen3_moe", _LINEAR),
    "qwen3_next": Nearest("qwen3_moe", _LINEAR),
    "qwen3_vl": Nearest("qwen3", _VISION),
    "stablelm": Nearest("llama", _LAYERNORM),
    "starcoder2": Nearest("llama", _LAYERNORM),
}


def describe_not_carried(model_type: object, carried: Collection[str]) -> str:
    """Say that a `model_type` is not carried, and which of those that are is the nearest."""
    wrong = f"model_type {shown(model_type)} is not carried"
    if isinstance(model_type, str) and (known := _NEAREST.get(model_type)) is not None:
        return f"{wrong}; the nearest that is, {known.model_type}, differs: {known.difference}"
    near = nearest(model_type, list(carried)) if isinstance(model_type, str) else None
    hint = f"; did you mean '{near}'?" if near else ""
    return f"{wrong}; {', '.join(carried)} are{hint}"
