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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from geojax.models.chunk.layer_io import layer_slice
from geojax.models.chunk.remat import computed_again
from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters
from geojax.models.embedding import embed_tokens
from geojax.models.feed_forward import Linear, linear
from geojax.models.head import token_loss
from geojax.models.layers import Block, LayerContext
from geojax.models.moe import weighted_aux_loss
from geojax.models.norm import Norm, norm
from geojax.models.parallel.parallelism import Parallelism


class MultiTokenPrediction(nnx.Module):
    """A module that predicts a later token."""

    def __init__(self, config: ModelConfig):
        hidden = config.hidden_size
        self.embedding_norm = Norm(hidden, config)
        self.stream_norm = Norm(hidden, config)
        self.projection = Linear(2 * hidden, hidden, config)
        self.layers = Block(config, with_experts=config.is_moe)
        self.final_norm = Norm(hidden, config)


RunLayer = Callable[..., tuple[jax.Array, jax.Array | None]]
"""(weights, stream, index=number in the whole model, context=context) to the stream after a layer
and its balance losses [B], None without experts."""


def mtp_loss(
    parameters: Parameters,
    normed: jax.Array,
    batch: dict[str, jax.Array],
    context: LayerContext,
    config: ModelConfig,
    parallelism: Parallelism,
    run_layer: RunLayer,
) -> jax.Array:
    """Return the share of all modules in the sum of losses, balance losses of experts included.

    The backward pass runs each module again, and keeps its inputs alone.

    Args:
        parameters: the modules' ("mtp"), the table of tokens and the head.
        normed: [B, S, H], the stream of the model after the final norm.
        batch: targets, loss_mask and segment_ids [B, S] of all positions.
        context: data of the batch for the model's layers.
        config: the model.
        parallelism: how the model is sharded.
        run_layer: runs a module's layer.
    """
    count = config.num_nextn_predict_layers
    weight = config.mtp_loss_scaling_factor / count
    table = parameters["embedding"]["tokens"]["embedding"]
    total: Any = 0
    for number in range(count):
        later = later_tokens(batch, number + 1)
        embedded = embed_tokens(table, later.tokens, config, parallelism)
        own = layer_slice(parameters["mtp"], number)
        inside = context._replace(segment_ids=later.segment_ids)
        run = functools.partial(run_layer, index=np.int32(config.num_hidden_layers + number))
        module = computed_again(functools.partial(_module, config, run))
        x, balance = module(inside, own, normed, embedded)
        normed = norm(own["final_norm"], x, config)
        loss = token_loss(parameters, normed, later.targets, later.mask, config, parallelism)
        total = total + weight * loss
        if balance is not None:
            total = total + weighted_aux_loss(balance, later.mask)
    made: jax.Array = total
    return made


def _module(
    config: ModelConfig,
    run_layer: RunLayer,
    context: LayerContext,
    parameters: Parameters,
    normed: jax.Array,
    embedded: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the stream [B, S, H] after a module's layer, and its balance losses [B]."""
    joined = [
        norm(parameters["embedding_norm"], embedded, config),
        norm(parameters["stream_norm"], normed, config),
    ]
    x = linear(parameters["projection"], jnp.concatenate(joined, axis=-1))
    return run_layer(parameters["layers"], x, context=context)


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
