"""Multi-token prediction: modules after the last layer that predict the tokens behind the next one.

    stream of the model, normed ─► norm ─┐
                                         ├─► projection ─► layer ─► norm ─┬─► head: token i + k + 1
    embedding of token i + k ────► norm ─┘                                └─► module k + 1

This is module k of D at position i. It reads the stream of the module before, the first one that of
the model, and shares the model's embedding and head. The modules exist to train the model, and to
draft tokens where it is served; evaluation and generation leave them out.

Position i has no prediction, and module k does not see it, where token i + k lies in another
document or behind the sequence. Losses are summed over all modules, times
`mtp_loss_scaling_factor` / D ("DeepSeek-V3 Technical Report", 2024, section 2.2). The report leaves
two things open, in which this is the code published with the weights: the stream comes after the
final norm, and the embedding comes first in the projection's input.

Shapes: B batch, S sequence, H hidden.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from geojax.models.block import block_of
from geojax.models.chunk.layer_io import layer_slice
from geojax.models.chunk.remat import computed_again
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings, LayerContext
from geojax.models.declaration import Parameters
from geojax.models.embedding import embed_tokens
from geojax.models.head import Head
from geojax.models.layers import Linear, Norm
from geojax.models.lora import scale_adapters
from geojax.models.moe import weighted_aux_loss


class MultiTokenPrediction(nnx.Module):
    """A module that predicts a later token."""

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        hidden = config.hidden_size
        self.embedding_norm = Norm(hidden, config)
        self.stream_norm = Norm(hidden, config)
        self.projection = Linear(2 * hidden, hidden, config)
        self.layers = block_of(config, compute, with_experts=config.is_moe)
        self.final_norm = Norm(hidden, config)

    def __call__(
        self, normed: jax.Array, embedded: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return the stream [B, S, H] after the module's layer, and its balance losses [B].

        `normed` is the stream of the module before after its final norm, and `embedded` that of the
        later tokens.
        """
        joined = [self.embedding_norm(embedded), self.stream_norm(normed)]
        return self.layers(self.projection(jnp.concatenate(joined, axis=-1)), context)


def mtp_loss(
    parameters: Parameters,
    normed: jax.Array,
    batch: dict[str, jax.Array],
    context: LayerContext,
    config: ModelConfig,
    compute: ComputeSettings,
) -> jax.Array:
    """Return the share of all modules in the sum of losses, balance losses of experts included.

    The backward pass runs each module again, and keeps its inputs alone.

    Args:
        parameters: the modules' ("mtp"), the table of tokens and the head.
        normed: [B, S, H], the stream of the model after the final norm.
        batch: targets, loss_mask and segment_ids [B, S] of all positions.
        context: data of the batch for the model's layers.
        config: the model.
        compute: how the modules' layers compute.
    """
    count, parallelism = config.num_nextn_predict_layers, compute.parallelism
    weight = config.mtp_loss_scaling_factor / count
    table = parameters["embedding"]["tokens"]["embedding"]
    declared_module = MultiTokenPrediction(config, compute)
    head = Head.of(parameters, config, compute)

    def run(
        inside: LayerContext, own: Parameters, normed: jax.Array, embedded: jax.Array, *, index: int
    ) -> tuple[jax.Array, jax.Array | None]:
        if config.lora is not None:
            own = scale_adapters(own, config.lora)
        module = nnx.merge(nnx.graphdef(declared_module), own)
        return module(normed, embedded, inside._replace(layer=jnp.int32(index)))

    total: Any = 0
    for number in range(count):
        later = later_tokens(batch, number + 1)
        embedded = embed_tokens(table, later.tokens, config, parallelism)
        own = layer_slice(parameters["mtp"], number)
        inside = context._replace(segment_ids=later.segment_ids)
        module = computed_again(functools.partial(run, index=config.num_hidden_layers + number))
        x, balance = module(inside, own, normed, embedded)
        normed = nnx.merge(nnx.graphdef(declared_module.final_norm), own["final_norm"])(x)
        total = total + weight * head.loss(normed, later.targets, later.mask)
        if balance is not None:
            total = total + weighted_aux_loss(balance, later.mask)
    made: jax.Array = total
    return made


class LaterTokens(NamedTuple):
    """The tokens that one module reads and predicts, each [B, S]."""

    tokens: jax.Array
    """Token i + k, to be embedded."""
    targets: jax.Array
    """Token i + k + 1."""
    mask: jax.Array
    """Weight of the target's loss, 0 where there is none."""
    segment_ids: jax.Array
    """The document of position i, 0 (padding) where token i + k is not in it."""


def later_tokens(batch: dict[str, jax.Array], depth: int) -> LaterTokens:
    """Shift a batch for module `depth`, from 1; nothing crosses the end of a document."""

    def shifted(leaf: jax.Array, by: int) -> jax.Array:
        return jnp.pad(leaf[:, by:], ((0, 0), (0, min(by, leaf.shape[1]))))

    segments = batch["segment_ids"]
    inside = segments == shifted(segments, depth)
    mask = shifted(batch["loss_mask"], depth)
    return LaterTokens(
        shifted(batch["targets"], depth - 1),
        shifted(batch["targets"], depth),
        jnp.where(inside, mask, 0),
        jnp.where(inside, segments, 0),
    )
