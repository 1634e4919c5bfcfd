"""The arithmetic of a step's memory: what each phase holds on one device, from the bytes of pieces.

    head         weights, sums, activations, the head forwards and backwards
    backward     weights, sums, activations, gradients of the head, a layer's backward
    embedding    weights, sums, gradients of the head, the embedding's backward
    reduce       sums, and the shards that they become
    update       shards

With one microbatch the weights are done with when the embedding goes backwards, and the sums begin
with the backward. With overlap the shards fill up while the layers go backwards. The pieces are
traced (`geojax.planner.step_pieces`); in a search they are in closed form
(`geojax.planner.cost.memory`).
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from geojax.config.layout import Layout
from geojax.models import AnyModel, ModelConfig
from geojax.pipeline.schedule import LayerBytes

USES = (
    "master weights",
    "frozen weights",
    "optimizer moments",
    "error feedback",
    "gathered weights",
    "gradients",
    "activations",
    "head and loss",
    "layer workspace",
    "attention workspace",
    "communication",
    "batch, counters",
)
"""Uses of memory, in the order of a table; the layer workspace is what one layer's backward, or
the embedding's, needs while it runs, and attention's is that of its kernel alone."""

ATTENTION = "attention workspace"
"""The use that a compile without a GPU does not count."""

PHASES = ("head", "backward", "embedding", "reduce", "update")
"""The phases of a step, in their order."""

ESTIMATE_ERROR = 0.1
"""Largest error of the estimate from traced pieces, as a share of it, on layouts compiled for GPUs
(`benchmarks/memory.py`)."""

BIASED_EXPERTS_ERROR = 0.17
"""The same of models whose experts have biases (gpt-oss)."""

Uses = dict[str, int]
"""Bytes by use."""


def estimate_error(model: AnyModel) -> float:
    """Return the largest error of the estimate that a class of models has shown."""
    is_biased = isinstance(model, ModelConfig) and model.moe_bias
    return BIASED_EXPERTS_ERROR if is_biased else ESTIMATE_ERROR


@dataclasses.dataclass(frozen=True)
class StepPieces:
    """Bytes on one device of the pieces of a step, of one microbatch."""

    non_layer_weights: int
    """Gathered weights in no layer."""
    layer_weights: int
    """Gathered weights of one layer."""
    expert_weights: int
    """The gathered weights of its experts; 0 without any."""
    held: LayerBytes
    """The bytes that a layer holds between its passes."""
    stream: int
    """The stream between two layers."""
    layer_backward: int
    """The most that a layer's backward needs at once, with the gradients that it returns."""
    layer_gradient: int
    """The gradients that a layer's backward returns."""
    attention: int
    """Workspace of attention's kernel beside all that."""
    head: int
    """The most that the head needs at once, forwards and backwards, with what it returns."""
    head_gradient: int
    """Gradients of the head's weights."""
    embedding_held: int
    """The bytes that the embedding holds for its backward."""
    embedding_backward: int
    """The most that its backward needs at once, with the gradients that it returns."""


@dataclasses.dataclass(frozen=True)
class GradientBytes:
    """Bytes of a device's gradients in the reduction dtype."""

    layers: int
    """The gradients of all layers, whole."""
    others: int
    """The others, whole; in a pipeline those of a tied table count twice."""
    layer_shards: int
    """A rank's shards of the former."""
    other_shards: int
    """A rank's shards of the latter."""
    largest: int
    """The largest leaf, whole."""
    has_errors: bool = False
    """True if the shards leave rounding errors, as large as they are."""
    early: int = 0
    """The largest part that a pipeline reduces beside ticks, whole; 0 if there is none."""

    @property
    def whole(self) -> int:
        """Bytes of all gradients, whole."""
        return self.layers + self.others

    @property
    def shards(self) -> int:
        """Bytes of a rank's shards of all gradients."""
        return self.layer_shards + self.other_shards

    @property
    def beside_ticks(self) -> int:
        """Bytes of a part on its way beside ticks, and of the sums of those before."""
        return self.early + self.shards if self.early else 0

    @property
    def reduced(self) -> int:
        """Bytes that a reduction makes of them; where nothing is scattered, it is in place."""
        return self.shards if self.shards < self.whole or self.has_errors else self.largest


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The bytes that one device holds while a step runs."""

    phases: Mapping[str, Counter[str]] = dataclasses.field(hash=False)
    """The bytes held in each phase of the step, by their use."""

    @classmethod
    def of(cls, state: Mapping[str, int], phases: Mapping[str, Uses]) -> "StepMemory":
        """Add the state, which all phases hold."""
        return cls({name: Counter(state) + Counter(held) for name, held in phases.items()})

    @property
    def phase(self) -> str:
        """The phase in which most is held."""
        return max(self.phases, key=lambda name: self.phases[name].total())

    @property
    def bytes(self) -> int:
        """The bytes held at the peak of the step."""
        return self.by_use.total()

    @property
    def largest(self) -> str:
        """The largest use at the peak."""
        return self.by_use.most_common(1)[0][0]

    @property
    def attention(self) -> int:
        """The bytes that attention's kernel takes while it runs."""
        return self.phases["backward"][ATTENTION]

    @property
    def by_use(self) -> Counter[str]:
        """The bytes held at the peak of the step, by their use."""
        return self.phases[self.phase]


def phases_of_step(
    layout: Layout, layers: int, pieces: StepPieces, gradients: GradientBytes
) -> dict[str, Uses]:
    """Return what the phases of a step without a pipeline hold beside the state.

    Args:
        layout: its layout, whose overlap is settled.
        layers: the number of layers.
        pieces: of the model.
        gradients: of all layers and of the rest.
    """
    zero, overlaps = layout.zero, layout.communication.overlap_grad_reduce is True
    bucket = layout.communication.bucket_layers
    bucket = 1 if bucket == "auto" else bucket
    several, in_shards = layout.batch.microbatches > 1, zero.stage >= 2
    # Kernels for experts read no slice of the stacked layers: it is copied.
    weights, copied = layers * pieces.layer_weights, pieces.expert_weights
    if zero.stage == 3 and zero.reshard_after_forward:  # a layer's, and the next one's
        weights, copied = 2 * pieces.layer_weights, 0
    weights += pieces.non_layer_weights
    of_layers = gradients.layer_shards if in_shards else gradients.layers
    of_others = gradients.other_shards if in_shards else gradients.others
    sums = of_layers + of_others if several else 0
    filling = 0 if several else of_layers
    if overlaps:
        filling = gradients.layer_shards
        if gradients.has_errors and layers > 2 * bucket:  # fewer layers are in no loop
            filling *= 2
    # XLA keeps the gradients of the head in float32 until they are summed: it rounds them then.
    behind_head = sums + filling + 2 * pieces.head_gradient
    if in_shards:  # the gradient of the last layer waits to be scattered
        behind_head += pieces.layer_gradient
    if overlaps:  # so do the others of its bucket, and those of the bucket that is computed
        behind_head += max(min(2 * bucket, layers) - 2, 0) * pieces.layer_gradient
    activations = layers * pieces.held.before_backward + pieces.embedding_held + pieces.stream
    # Without a loop, a layer's gradient takes the place of its activations.
    replaced = min(filling, activations) if layout.scan_layers is False else 0
    return {
        "head": {
            "gathered weights": weights,
            "gradients": sums,
            "activations": activations,
            "head and loss": pieces.head,
        },
        "backward": {
            "gathered weights": weights,
            "gradients": behind_head - replaced,
            "activations": activations,
            "layer workspace": pieces.layer_backward + copied,
            ATTENTION: pieces.attention,
        },
        "embedding": {
            "gathered weights": weights if several else 0,
            "gradients": behind_head,
            "layer workspace": pieces.embedding_backward,
        },
        "reduce": {"gradients": of_layers + of_others, "communication": gradients.reduced},
        "update": {"gradients": gradients.shards},
    }


def phases_of_stage(
    layers: int,
    activations: int,
    pieces: StepPieces,
    gradients: GradientBytes,
    *,
    holds_chunks: bool,
    adds_in_products: bool,
) -> dict[str, Uses]:
    """Return what the phases of a pipeline in one program hold on a stage, beside the state.

    Args:
        layers: the layers of the stage, padding included.
        activations: what the layers hold of all microbatches in flight.
        pieces: of the model.
        gradients: of the stage.
        holds_chunks: it runs copies of its chunks of one layer, one in each direction.
        adds_in_products: the copy that goes backwards has gradients of its own.
    """
    weights, sums = pieces.non_layer_weights + layers * pieces.layer_weights, gradients.whole
    if holds_chunks:
        weights += 2 * pieces.layer_gradient
    if holds_chunks and adds_in_products:
        sums += gradients.layers // layers
    passes = {
        "gathered weights": weights,
        "gradients": sums,
        "activations": activations,  # the embedding is computed again
    }
    return {
        "head": passes | {"head and loss": pieces.head},
        "backward": passes
        | {
            "layer workspace": pieces.layer_backward + pieces.expert_weights,
            ATTENTION: pieces.attention,
            "communication": gradients.beside_ticks,
        },
        "embedding": passes | {"layer workspace": pieces.embedding_backward},
        "reduce": {"gradients": gradients.whole, "communication": gradients.reduced},
        "update": {"gradients": gradients.shards},
    }


def phases_of_site(
    held: Uses, activations: int, pieces: StepPieces, *, has_embedding: bool, has_head: bool
) -> dict[str, Uses]:
    """Return what the phases of a site with its own runtime hold, or of a stage of it.

    Args:
        held: gathered weights, gradients and messages, which it holds all the time.
        activations: what the microbatches hold between their forwards and backwards.
        pieces: of the model.
        has_embedding: True if it embeds the tokens.
        has_head: True if it computes the loss.
    """
    passes = held | {"activations": activations}
    of_head = pieces.head_gradient if has_head else 0
    workspace = of_head + pieces.layer_backward + pieces.expert_weights
    own = {"layer workspace": workspace, ATTENTION: pieces.attention}
    phases = {"backward": passes | own}
    if has_head:
        phases = {"head": passes | {"head and loss": pieces.head}} | phases
    if has_embedding:
        phases["embedding"] = passes | {"layer workspace": of_head + pieces.embedding_backward}
    return phases | {"update": held}
