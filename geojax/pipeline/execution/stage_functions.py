"""What a pipeline executes: the pieces of a model, as functions that the executor puts together."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from geojax.models.chunk.layer_scan import Layer
from geojax.models.parameters import Parameters

Microbatch = Any
"""A pytree of arrays whose leading dim counts rows."""


@dataclasses.dataclass(frozen=True)
class StageFunctions:
    """The pieces of a model; called inside the step's `shard_map` with this rank's part."""

    embed: Callable[[Parameters, Microbatch], jax.Array]
    """(the weights of the first stage, a microbatch) to the stream before the first layer."""
    layer: Layer
    """A layer, under whatever rematerialisation."""
    head: Callable[[Parameters, jax.Array, Microbatch], jax.Array]
    """(the weights of the last stage, the stream after the last layer, a microbatch) to the sum of
    the losses."""
    context: Callable[[Microbatch], Any] = lambda microbatch: None
    """What every layer reads of a microbatch and is not differentiated in: tables, masks, keys."""
    balance: Callable[[jax.Array, Microbatch], jax.Array] | None = None
    """(the balance losses of a chunk's layers [rows], a microbatch) to what they add to the loss:
    linear. None where layers have none."""


class StageWeights(NamedTuple):
    """What one rank holds of the weights, or of their gradients."""

    first: Parameters
    """Of the stage that embeds; zeros elsewhere. Gradients mean something on that stage alone."""
    layers: Parameters
    """Stacked on a leading dim: the stage's chunks one after the other, each filled up to the
    length of the longest one."""
    last: Parameters
    """Of the stage that has the head; zeros elsewhere."""


class PipelineGradients(NamedTuple):
    """What a pipeline has made of the microbatches of a step."""

    loss: jax.Array
    """The sum of the losses, on the last stage; zero elsewhere."""
    balance: jax.Array | None
    """What the balance of this stage's layers adds to it."""
    weights: StageWeights
    """The gradients of loss and balance, summed over microbatches."""
