"""The weights of a pipeline stage, and the gradients that a pipeline gives."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from geojax.models.declaration import Parameters
from geojax.pipeline.execution.ready_parts import Part


class StageWeights(NamedTuple):
    """A rank's part of the weights of a stage, or of their gradients."""

    first: Parameters
    """Weights of the embedding; zeros but on the stage that embeds, where alone gradients count."""
    layers: Parameters
    """Stacked on a leading dim: the stage's chunks one after the other, each filled up to the
    length of the longest one."""
    last: Parameters
    """Weights of the head; zeros but on the stages that have it."""


class PipelineGradients(NamedTuple):
    """Loss and gradients of the microbatches of a step on one stage."""

    loss: jax.Array
    """The sum of the losses of the tokens whose head the stage has; zero without any."""
    balance: jax.Array | None
    """The share of this stage's balance losses in it; None without experts."""
    weights: StageWeights
    """The gradients of loss and balance, summed over microbatches."""
    exchanged: Mapping[Part, Any]
    """The parts of them that were sent early, as they came back."""
