"""The operations of a model's parts, and the layers of each chunk by them.

Counted as `geojax.models.flops` does: a forward pass takes 2 operations for each weight of a kernel
and token, so do the gradient of the input and that of the weights. The two products of attention
have no weights, so all of their backward is the input's. The embedding looks up and computes
nothing.
"""

from typing import NamedTuple

from geojax.models.chunk.remat import Remat
from geojax.models.config import ModelConfig
from geojax.models.flops import attended_positions, model_flops
from geojax.pipeline.balance import balanced_layers


class Operations(NamedTuple):
    """Operations of one token."""

    forward: float
    backward: float
    """The gradient of the input, with what it computes again."""
    weight: float
    """The gradient of the weights."""


def head_operations(model: ModelConfig) -> Operations:
    """Return the operations of the head, which is not rematerialized."""
    return Operations(*[2.0 * model.hidden_size * model.vocab_size] * 3)


def layer_operations(model: ModelConfig, sequence: int, remat: Remat = "none") -> Operations:
    """Return the operations of one layer, in sequences of `sequence` tokens; the mean of all.

    `remat` adds attention's forward ("selective") or all of it ("full") to the backward.
    """
    attended = attended_positions(model, sequence) / model.num_hidden_layers
    attention = 4.0 * model.num_attention_heads * model.head_dim * attended
    of_layers = model_flops(model, sequence) - sum(head_operations(model))
    kernels = of_layers / model.num_hidden_layers / 3 - attention
    again = {"none": 0.0, "selective": attention, "full": kernels + attention}[remat]
    return Operations(kernels + attention, kernels + 2 * attention + again, kernels)


def layers_by_operations(
    model: ModelConfig, sequence: int, chunks: int, remat: Remat = "none"
) -> tuple[int, ...]:
    """Deal out layers so that all stages are equally fast, the head counted.

    Raises:
        UserError: there are more chunks than layers.
    """
    layer = sum(layer_operations(model, sequence, remat))
    return balanced_layers(
        [layer] * model.num_hidden_layers, chunks, after=sum(head_operations(model))
    )
