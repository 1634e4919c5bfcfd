"""Floating-point operations of training, by the count that MFU is reported with."""

import jax

from geojax.models.config import ModelConfig
from geojax.models.parameters import active_parameter_count, parameter_count, parameter_shapes


def model_flops(config: ModelConfig, sequence: int) -> int:
    """Count the FLOPs of one token, forward and backward, in sequences of `sequence` tokens.

    Only matmuls count: 6 for each weight of a kernel that the token activates (2 forward, 4
    backward; of experts those that it goes to), the head included and the embedding's look-up not,
    plus 12 * heads * head_dim * sequence a layer for scores and weighted values. Causality is not
    discounted (every token counts as if it attended to the whole sequence) and nothing
    is added for recomputation, as in PaLM (Chowdhery et al. 2022, appendix B) and, for GPT-3's
    shape and without its recomputation term, equation 3 of Narayanan et al. 2021 ("Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"), so that the number
    compares with published ones.
    """
    layers = jax.tree_util.tree_leaves_with_path(parameter_shapes(config)["layers"])
    kernels = sum(leaf.size for path, leaf in layers if path[-1].key == "kernel")
    kernels -= parameter_count(config) - active_parameter_count(config)
    head = config.hidden_size * config.vocab_size
    attention = (
        12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sequence
    )
    return 6 * (kernels + head) + attention
