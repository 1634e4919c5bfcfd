"""Floating-point operations of training, by the count that MFU is reported with."""

import math
from collections import Counter

import jax

from geojax.models.config import ModelConfig
from geojax.models.declaration import Kind
from geojax.models.own.settings import AnyModel, OwnModel
from geojax.models.own.work import own_flops
from geojax.models.parameters import declarations, parameter_count


def attended_positions(config: ModelConfig, sequence: int) -> int:
    """Sum over layers the positions that a token counts as attending to: all, or its window's.

    The layers of modules for later tokens are among them.
    """
    period, layers = config.has_window, config.num_hidden_layers + config.num_nextn_predict_layers
    windows = sum(period[layer % len(period)] for layer in range(layers))
    window = min(config.sliding_window or sequence, sequence)
    return windows * window + (layers - windows) * sequence


def active_parameter_count(config: AnyModel) -> int:
    """Count the parameters that one token activates: of the experts those that it goes to."""
    experts = [leaf for leaf in jax.tree.leaves(declarations(config)) if "expert" in leaf.axes]
    if not experts or isinstance(config, OwnModel):
        return parameter_count(config)
    unmet = config.num_experts - config.num_experts_per_tok
    of_one = sum(math.prod(leaf.shape) for leaf in experts) // config.num_experts
    return parameter_count(config) - unmet * of_one


def model_flops(config: AnyModel, sequence: int) -> int:
    """Count the FLOPs of one token, forward and backward, in sequences of `sequence` tokens.

    Only matmuls count: 6 for each weight of a kernel that the token activates (2 forward, 4
    backward). Active kernels are the token's experts and the head, but not the embedding's look-up.
    Scores and weighted values add 6 * heads * (head_dim + v_head_dim) * sequence a layer. Causality
    is not discounted: every token counts as if it attended to the whole sequence, or to a whole
    window. Recomputation does not count. Both rules are those of PaLM (Chowdhery et al. 2022,
    appendix B), so that the number compares with published ones. For GPT-3's shape, it is equation
    3 of Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM") without the recomputation term. Modules for later tokens are counted likewise,
    each with the head. With adapters the frozen weights take 4 (no gradient of theirs is computed),
    and those of adapters 6. Of a model of your own all products of its forward count, three times.
    """
    if isinstance(config, OwnModel):
        return own_flops(config, sequence)
    sizes: Counter[Kind | None] = Counter()
    for leaf in jax.tree.leaves(declarations(config)):
        sizes[leaf.kind] += math.prod(leaf.shape)
    kernels = sizes["matrix"] - parameter_count(config) + active_parameter_count(config)
    adapters = sizes["adapter"]
    heads = 1 + config.num_nextn_predict_layers
    head = heads * config.hidden_size * config.vocab_size
    attended = attended_positions(config, sequence)
    widths = config.head_dim + config.v_head_dim
    attention = 6 * config.num_attention_heads * widths * attended
    of_frozen = 6 if config.lora is None else 4
    return of_frozen * (kernels + head) + 6 * adapters + attention
