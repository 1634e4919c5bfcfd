"""The weights of a pipeline stage, and the gradients that a pipeline gives."""

from typing import NamedTuple

import jax

from geojax.models.parameters import Parameters


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
