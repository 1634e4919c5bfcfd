"""Layouts and models drawn at random: everything that may be combined, in any combination."""

import dataclasses
import random

from geojax.errors import UserError
from geojax.mesh import AXES
from geojax.models import ModelConfig
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import Parallelism

DEVICES, ROWS, SEQUENCE = 8, 16, 32
_LAYOUT_AXES = tuple(axis for axis in AXES if axis != "stage")
_SIZES = {
    # The vocabulary divides over no number of ranks.
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 8,
    "head_dim": 4,
    "intermediate_size": 40,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
_FAMILIES = {
    "gpt3": {
        "norm": "layernorm",
        "hidden_act": "gelu_pytorch_tanh",
        "position_embedding_type": "learned_absolute",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama": {"norm": "rmsnorm", "hidden_act": "silu"},
    "ministral": {
        "sliding_window": 5,
        "layer_types": ("full_attention", "sliding_attention"),
    },
    "gemma": {
        "norm": "rmsnorm1p",
        "sandwich_norm": True,
        "hidden_act": "gelu_pytorch_tanh",
        "gated": True,
        "scale_embeddings": True,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 6,
        "rope_local_base_freq": 100.0,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "z_loss_coef": 0.1,
        "sliding_window": 5,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "gpt-oss": {
        "use_attention_sinks": True,
        "qkv_bias": True,
        "attention_output_bias": True,
        "swiglu_limit": 0.1,  # many gates are beyond it
        "sliding_window": 5,
        "layer_types": ("sliding_attention", "full_attention"),
    },
    "qwen3": {"norm": "rmsnorm", "hidden_act": "silu", "use_qk_norm": True},
    "nemotron": {
        "norm": "layernorm1p",
        "hidden_act": "relu2",
        "rope_parameters": {"partial_rotary_factor": 0.5},
    },
}
_LATENT_DIMS = {
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
_FAMILIES["deepseek"] = _LATENT_DIMS | {"rope_interleave": True}
_MIXTURES = {
    "dense": {},
    "dropless": {"num_experts": 8, "num_experts_per_tok": 2},
    "biased": {"num_experts": 8, "num_experts_per_tok": 2, "moe_bias": True},
    "capacity": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "capacity_factor": 1.0,
    },
    "balanced": {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "use_router_bias": True,
    },
}


@dataclasses.dataclass(frozen=True)
class Draw:
    """One combination; `repr` says it all."""

    family: str
    mixture: str
    key_value_heads: int
    dropout: float
    axes: tuple[tuple[str, int], ...]
    microbatches: int
    options: tuple[tuple[str, object], ...]
    """Of the `StepPlan`."""
    later_tokens: int = 0
    """Modules that predict later tokens."""

    def model(self) -> ModelConfig:
        sizes = _SIZES | {"num_key_value_heads": self.key_value_heads}
        if self.family == "deepseek":
            sizes = {name: _SIZES[name] for name in _SIZES if name != "head_dim"}
        mixture = _MIXTURES[self.mixture]
        others = {"dropout": self.dropout, "num_nextn_predict_layers": self.later_tokens}
        return ModelConfig(**sizes | _FAMILIES[self.family] | mixture | others)


def draw(seed: int, index: int) -> Draw:
    """The `index`-th draw of `seed`: a combination that the checks of layouts accept."""
    generator = random.Random(f"{seed}/{index}")
    later_tokens = random.Random(f"{seed}/{index}/later tokens").choice([0, 0, 0, 0, 0, 0, 1, 2])
    while True:
        candidate = _candidate(generator)
        if candidate.family != "gpt3":  # its positions are learned
            candidate = dataclasses.replace(candidate, later_tokens=later_tokens)
        try:
            check_parallelism(candidate.model(), _parallelism(candidate), SEQUENCE)
        except UserError:
            continue
        return candidate


def _candidate(generator: random.Random) -> Draw:
    axes = _factors(generator)
    family = generator.choice(list(_FAMILIES))
    stage = generator.choice([0, 1, 2, 3])
    options = {
        "zero_stage": stage,
        "remat": generator.choice(["none", "selective", "full"]),
        "overlap_grad_reduce": generator.random() < 0.3,
        "bucket_bytes": generator.choice([None, 2048]),
    }
    if axes["tensor"] > 1:
        options["sequence_parallel"] = generator.random() < 0.5
    if axes["context"] > 1:
        options["context_method"] = generator.choice(["ring", "all_gather", "ulysses"])
    if stage > 0 and axes["dc"] > 1:
        options["shard_across_sites"] = generator.random() < 0.3
    if stage == 3:
        options["reshard_after_forward"] = generator.random() >= 0.5
    return Draw(
        family=family,
        mixture="dense" if family == "gemma" else generator.choice(list(_MIXTURES)),
        key_value_heads=generator.choice([2, 8]),
        dropout=generator.choice([0.0, 0.1]),
        axes=tuple(axes.items()),
        microbatches=generator.choice([1, 2]),
        options=tuple(options.items()),
    )


def _factors(generator: random.Random) -> dict[str, int]:
    """Sizes of the axes whose product is `DEVICES`: each factor of two goes to some axis."""
    axes = dict.fromkeys(_LAYOUT_AXES, 1)
    for _ in range(DEVICES.bit_length() - 1):
        axes[generator.choice(_LAYOUT_AXES)] *= 2
    return axes


def _parallelism(drawn: Draw) -> Parallelism:
    axes, options = dict(drawn.axes), dict(drawn.options)
    return Parallelism(
        tensor=axes["tensor"],
        sequence=bool(options.get("sequence_parallel", False)),
        context=axes["context"],
        context_method=options.get("context_method", "ring"),
        expert=axes["expert"],
    )
