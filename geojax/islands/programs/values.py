"""Values that the programs of a site hand to one another; every array in them is a `PerRank`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from geojax.models import Parameters
from geojax.models.chunk.chunk import ChunkResiduals


class StepInputs(NamedTuple):
    """The arguments of a step that many programs read; these are sharded as everywhere."""

    batch: Any
    """The site's sequences."""
    loss_scale: Any
    """The state's."""
    seed: Any
    step: Any
    """The number of steps done, of which dropout masks are made."""


class LayerShards(NamedTuple):
    """A rank's shards of stacked layers, which every pass gathers layer by layer (ZeRO 3)."""

    shards: Parameters
    """As they travel: in the compute dtype, or quantized."""
    prev_amax: Any
    """The amax of the steps before (see `geojax.step.amax_history`); None: no history."""


class SiteWeights(NamedTuple):
    """The weights that a site computes with."""

    non_layer_params: Parameters
    chunks: Mapping[int, list[Parameters | LayerShards]]
    """The layers of each chunk, stacked, for each span of layers that multiply alike."""


class ChunkParameters(NamedTuple):
    """The weights that a chunk computes with."""

    first: Parameters
    """Read by the embedding; {} where the chunk is not the first."""
    spans: list[Parameters | LayerShards]
    """Layers, stacked, for each span of layers that multiply alike."""
    last: Parameters
    """Read by the head; {} where the chunk is not the last."""


class PassInputs(NamedTuple):
    """The arguments of a pass of a chunk for a microbatch, but for sums."""

    weights: Any
    """Its `ChunkParameters`."""
    taken: Any
    """The stream or the cotangent that another chunk has made; None at an end of the model."""
    kept: Any
    """The `Kept` of its forward; None before that."""
    step: StepInputs
    microbatch: Any
    """Its number."""


class Kept(NamedTuple):
    """The results of the forward of a chunk that its backward reads."""

    residuals: ChunkResiduals
    aux_loss: jax.Array | None
    """The share of the chunk's balance losses in the loss; None without experts."""
    stash: list[Any] | None = None
    """The stash of the first half of a split backward; None before it."""


class ChunkSums(NamedTuple):
    """Sums over the microbatches of a step in one chunk, on this rank."""

    layers: Any
    """The sink's."""
    first: Parameters
    """The gradient of the embedding; {} where the chunk is not the first."""
    last: Parameters
    """The gradient of what the head reads; {} where the chunk is not the last."""
    loss: jax.Array
    aux_loss: jax.Array | None


class ChunkScalars(NamedTuple):
    """The share of a chunk in the scalars of a step, on this rank."""

    loss: jax.Array
    aux_loss: jax.Array | None
    amax: Any


class Reduced(NamedTuple):
    """A chunk's sums over its site."""

    messages: Any
    """The bucket as it crosses (see `geojax.islands.programs.buckets`)."""
    error_feedback: Any
    scalars: ChunkScalars


class StepScalars(NamedTuple):
    """The few numbers of a step that sites exchange."""

    sums: jax.Array
    """Losses and counts as in `SiteSums.scalars`."""
    squares: jax.Array | None
    """The squared norm of the gradients that the site holds alone; None: every site holds all."""
    amax: jax.Array | None
    """The layers' amax, a maximum instead of a sum; None: sites share none."""


class StepSums(NamedTuple):
    """The sums of a step over all sites, which its update takes."""

    totals: list[Any]
    """The gradients of each chunk."""
    scalars: Any
    """`StepScalars`."""
