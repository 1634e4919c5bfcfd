"""The operations of a model's parts, and the layers of each chunk by them.

Counted as `geojax.models.flops` does: a forward pass takes 2 operations for each weight of a kernel
and token, so do the gradient of the input and that of trained weights. The two products of
attention have no weights, so all of their backward is the input's. The embedding looks up and
computes nothing.
"""

import math
from typing import NamedTuple

import jax

from geojax.models import AnyModel, ModelConfig, OwnModel
from geojax.models.chunk.remat import Remat
from geojax.models.declaration import Kind
from geojax.models.flops import attended_positions, model_flops
from geojax.models.own.work import flops, head_products, layer_products
from geojax.models.parameters import declarations
from geojax.pipeline.balance import balanced_layers


class Operations(NamedTuple):
    """Operations of one token."""

    forward: float
    backward: float
    """The gradient of the input, with what it computes again."""
    weight: float
    """The gradient of the weights."""


def head_operations(model: AnyModel, sequence: int) -> Operations:
    """Return the operations of the head, which is not rematerialized.

    Each module for later tokens runs it once more, behind a layer whose backward computes all of it
    again.
    """
    if isinstance(model, OwnModel):
        own = flops(head_products(model, 1, sequence)) / sequence
        return Operations(own, 2 * own, own)  # its backward computes the logits again
    modules = model.num_nextn_predict_layers
    kernel = 2.0 * model.hidden_size * model.vocab_size * (1 + modules)
    head = Operations(kernel, kernel, kernel if model.lora is None else 0.0)
    if not modules:
        return head
    layer = layer_operations(model, sequence, "full")
    projection = 4.0 * model.hidden_size**2
    return Operations(
        head.forward + modules * (layer.forward + projection),
        head.backward + modules * (layer.backward + 2 * projection),
        head.weight + modules * (layer.weight + projection),
    )


def layer_operations(model: AnyModel, sequence: int, remat: Remat = "none") -> Operations:
    """Return the operations of one stacked layer, in sequences of `sequence` tokens; the mean.

    `remat` adds attention's forward ("selective") or all of it ("full") to the backward.
    """
    if isinstance(model, OwnModel):
        layer = flops(layer_products(model, 1, sequence)) / sequence
        return _block(model, layer, 0.0, 0.0, remat)
    model = model.without_later_tokens
    attention = _attention_operations(model, sequence)
    base = model.base
    all_layers = (model_flops(base, sequence) - sum(head_operations(base, sequence))) / 3
    first = _products(base, "matrix", "embedding") + model.first_k_dense_replace * attention
    kernels = (all_layers - first) / model.num_stacked_layers - attention
    adapters = _products(model, "adapter", "layers") / model.num_stacked_layers
    return _block(model, kernels, adapters, attention, remat)


def first_operations(model: AnyModel, sequence: int) -> Operations:
    """Return the operations of the first dense layers, whose backward computes them again."""
    if isinstance(model, OwnModel):
        return Operations(0.0, 0.0, 0.0)
    attention = model.first_k_dense_replace * _attention_operations(model, sequence)
    adapters = _products(model, "adapter", "embedding")
    return _block(model, _products(model, "matrix", "embedding"), adapters, attention, "full")


def _block(
    model: AnyModel, kernels: float, adapters: float, attention: float, remat: Remat
) -> Operations:
    """Return the operations of layers by those of the forward of their parts."""
    forward = kernels + adapters + attention
    again = {"none": 0.0, "selective": attention, "full": forward}[remat]
    trained = kernels if model.lora is None else adapters
    return Operations(forward, forward + attention + again, trained)


def _products(model: ModelConfig, kind: Kind, part: str) -> float:
    """Return the operations of the forward of all products with such parameters of a part."""
    leaves = jax.tree.leaves(declarations(model)[part])
    return 2.0 * sum(math.prod(leaf.shape) for leaf in leaves if leaf.kind == kind)


def _attention_operations(model: ModelConfig, sequence: int) -> float:
    """Return the operations of one layer's scores and weighted values; the mean of all layers."""
    model = model.without_later_tokens
    attended = attended_positions(model, sequence) / model.num_hidden_layers
    return 2.0 * model.num_attention_heads * (model.head_dim + model.v_head_dim) * attended


def layers_by_operations(
    model: AnyModel, sequence: int, chunks: int, remat: Remat = "none"
) -> tuple[int, ...]:
    """Deal out layers so that all stages are equally fast, the head counted.

    Raises:
        UserError: there are more chunks than layers.
    """
    layer = sum(layer_operations(model, sequence, remat))
    return balanced_layers(
        [layer] * model.num_stacked_layers,
        chunks,
        before=sum(first_operations(model, sequence)),
        after=sum(head_operations(model, sequence)),
    )
