"""Phi-3 and Phi-4: Llama whose queries, keys and values are one tensor, as are gate and up.

Longer contexts by longrope change its factors with the text's length; they are refused, unless they
are all 1.
"""

from collections.abc import Mapping
from typing import Any, Literal

from geojax.errors import UserError
from geojax.models.config import ModelConfig
from geojax.models.families.llama import ATTENTION_DROPOUT, EMBEDDING_AND_HEAD, SILU, SIZES, SWIGLU
from geojax.models.huggingface.family import ConfigKey, Family, TensorRule


def _layer(theirs: str, *owners: str) -> TensorRule:
    leaves = tuple(f"layers.{owner}.kernel" for owner in owners)
    return TensorRule(f"model.layers.{{layer}}.{theirs}.weight", leaves, transposed=True)


_LAYERS = (
    TensorRule("model.layers.{layer}.input_layernorm.weight", ("layers.attention_norm.scale",)),
    _layer("self_attn.qkv_proj", "attention.query", "attention.key", "attention.value"),
    _layer("self_attn.o_proj", "attention.output"),
    TensorRule(
        "model.layers.{layer}.post_attention_layernorm.weight", ("layers.feed_forward_norm.scale",)
    ),
    _layer("mlp.gate_up_proj", "feed_forward.gate", "feed_forward.up"),
    _layer("mlp.down_proj", "feed_forward.down"),
)


def _without_longrope(content: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Leave out longrope whose factors are all 1.

    Raises:
        UserError: they are not, or change with the length.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    scaling = content.get(key)
    if not isinstance(scaling, Mapping) or not {"short_factor", "long_factor"} & scaling.keys():
        return content
    longest = content.get("max_position_embeddings", 4096)
    is_longer = longest != content.get("original_max_position_embeddings", longest)
    factors = [*scaling.get("short_factor", ()), *scaling.get("long_factor", ())]
    if is_longer or any(factor != 1 for factor in factors):
        raise UserError(
            f"{source}: {key} has longrope, whose factors change with the length of a text; it is "
            "not carried. A config.json of the short context would be"
        )
    left = ("short_factor", "long_factor", "type", "rope_type")
    return {**content, key: {name: each for name, each in scaling.items() if name not in left}}


class Phi3(ModelConfig):
    """A model whose checkpoints have fused kernels; it computes what Llama does."""

    model_type: Literal["phi3"] = "phi3"
    """Family of the model."""


PHI3 = Family(
    model_type="phi3",
    settings=Phi3,
    architecture="Phi3ForCausalLM",
    keys=(
        *SIZES,
        ConfigKey("num_key_value_heads", ("num_key_value_heads",), None),
        ConfigKey("max_position_embeddings", ("max_position_embeddings",), 4096),
        ConfigKey("rms_norm_eps", ("rms_norm_eps",), 1e-5),
        ConfigKey("sliding_window", ("sliding_window",), None),
        ConfigKey("embd_pdrop", ("dropout",), 0.0),
        ConfigKey("resid_pdrop", ("dropout",), 0.0),
    ),
    implied=SWIGLU,
    fixed=SILU,
    rates=ATTENTION_DROPOUT,
    written={"pad_token_id": None},
    unwritten={"attention_bias": False},
    # It tells where longrope changes its factors.
    ignored_keys=frozenset({"original_max_position_embeddings"}),
    tensors=EMBEDDING_AND_HEAD + _LAYERS,
    partial_rotary_factor=1.0,
    carried_scaling=_without_longrope,
)
