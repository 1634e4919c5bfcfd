"""The chunks that one stage holds: their passes, with residuals in ring buffers.

A `StageChunks` makes `Chunk`s whose number on the stage only the running program knows, and whose
stores are slots of rings that are updated in place. Chunks may have different numbers of layers:
their loops then have a length that the stage knows and the program does not.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from geojax.models.chunk.chunk import (
    Chunk,
    ChunkResiduals,
    ChunkWeights,
    Microbatch,
    ModelFunctions,
)
from geojax.models.chunk.layer_io import (
    LayerWeights,
    SliceGradients,
    StackedWeights,
    layer_slice,
)
from geojax.models.chunk.layer_scan import Layers, Span, forward_layer
from geojax.models.chunk.residuals import Residuals
from geojax.models.chunk.split_backward import SplitBackward, Stash
from geojax.models.parallel.varying import typed_like, vary_over, varying_axes, zeros_of
from geojax.models.parameters import Parameters
from geojax.pipeline.execution.ring_buffers import get_layer, put_layer
from geojax.pipeline.execution.stage_weights import StageWeights
from geojax.pipeline.schedule import Placement

Tree = TypeVar("Tree")
Rings = list[jax.Array]
"""Ring buffers, each [slots, layers of a chunk, ...]."""


@dataclasses.dataclass(frozen=True)
class RingStore:
    """A store that keeps the values of a chunk's layers in one slot of some rings."""

    rings: Rings
    slot: jax.Array
    example: Any
    """A pytree in the structure of one layer's values."""

    def start(self) -> Rings:
        """Return the rings as they are."""
        return self.rings

    def put(self, stored: Rings, index: jax.Array, value: Any) -> tuple[Rings, None]:
        """Write into the rings, in place."""
        leaves = jax.tree.leaves(value)
        return [
            put_layer(ring, leaf, self.slot, index)
            for ring, leaf in zip(stored, leaves, strict=True)
        ], None

    def get(self, stored: Rings, index: jax.Array) -> Any:
        """Read from the rings."""
        leaves = [get_layer(ring, self.slot, index) for ring in stored]
        return jax.tree.unflatten(jax.tree.structure(self.example), leaves)


class StageChunks:
    """The chunks of one stage, in one trace of the program."""

    def __init__(
        self,
        functions: ModelFunctions,
        weights: StageWeights,
        microbatch: Microbatch,
        stage: jax.Array,
        axes: tuple[str, ...],
        placement: Placement,
        layers_per_chunk: tuple[int, ...],
        *,
        split: bool,
    ):
        """Trace a layer once for its types.

        Args:
            functions: the pieces of the model.
            weights: of the stage.
            microbatch: any one, for its types.
            stage: the number of this stage.
            axes: the mesh axes that number the stages.
            placement: which stage holds which chunk.
            layers_per_chunk: in the model's order.
            split: whether the backward is split.
        """
        self._functions, self._weights, self._stage = functions, weights.layers, stage
        self._count_layers(placement, layers_per_chunk)
        self._layer = layer_slice(weights.layers, 0)
        self._context = jax.eval_shape(functions.context, microbatch)
        embedded = jax.eval_shape(functions.embed, weights.first, microbatch)
        self.stream = self._stream_type(embedded, frozenset(axes))
        """The type of the stream between layers; no layer makes it vary over more axes."""
        of_layer = jax.eval_shape(self._forward, self._layer, self.stream, stage, self._context)
        (_, self.balance), self.residuals = of_layer
        """The types of one layer's balance losses and residuals."""
        self.stashed = self._stash_types() if split else None
        """The types of the stash of a layer's split backward; None: it is not split."""

    def _count_layers(self, placement: Placement, layers_per_chunk: tuple[int, ...]) -> None:
        assert len(layers_per_chunk) == placement.chunks, "each chunk must have a number of layers"
        self.max_layers_per_chunk = max(layers_per_chunk)
        """The layers of the longest chunk; the weights of shorter ones are padded to as many."""
        shape = (placement.stages, placement.chunks_per_stage)
        counts, firsts = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for stage in range(placement.stages):
            for number, chunk in enumerate(placement.chunks_of(stage)):
                counts[stage, number] = layers_per_chunk[chunk]
                firsts[stage, number] = sum(layers_per_chunk[:chunk])
        self._firsts = jnp.asarray(firsts)[self._stage]
        self._counts = jnp.asarray(counts)[self._stage]
        self._even = len(set(layers_per_chunk)) == 1

    def _stream_type(self, embedded: Any, axes: frozenset[str]) -> Any:
        axes = axes | varying_axes(embedded)
        while True:
            stream = jax.eval_shape(functools.partial(vary_over, axes=axes), embedded)
            of_layer = jax.eval_shape(
                self._forward, self._layer, stream, self._stage, self._context
            )
            behind = of_layer[0][0]
            if varying_axes(behind) <= axes:
                return stream
            axes |= varying_axes(behind)

    def _forward(
        self, weights: Parameters, x: jax.Array, number: jax.Array, context: Any
    ) -> tuple[tuple[jax.Array, jax.Array | None], Residuals]:
        return forward_layer(self._functions.layer, x, (weights, number, context))

    def _stash_types(self) -> Stash:
        def stashed(residuals: Residuals, again: Any, cotangents: Any) -> Stash:
            split = SplitBackward.of(residuals, again, cotangents)
            return split.input_gradient(residuals, again, cotangents)[1]

        again = (self._layer, self._stage, self._context)
        made: Stash = jax.eval_shape(stashed, self.residuals, again, (self.stream, self.balance))
        return made

    def typed(self, x: jax.Array) -> jax.Array:
        """Type `x` as a stream between layers."""
        return typed_like(x, self.stream)

    def forward(
        self,
        x: jax.Array,
        rings: Rings,
        slot: jax.Array,
        chunk: jax.Array,
        batch: Microbatch,
        context: Any,
    ) -> tuple[jax.Array, jax.Array | None, Rings]:
        """Run a chunk forwards: the stream, what its balance adds to the loss, and the rings."""
        balance = None if self.balance is None else zeros_of(self.balance)
        made = self._chunk(chunk, rings, slot).forward(
            self._weights_of(chunk), x, batch, context, balance=balance
        )
        return made.x, made.balance, made.residuals.layers[0]

    def forward_only(
        self, x: jax.Array, chunk: jax.Array, batch: Microbatch, context: Any
    ) -> jax.Array:
        """Run a chunk forwards and keep nothing."""
        return self._chunk(chunk).forward_only(self._weights_of(chunk), x, batch, context)[0]

    def backward(
        self,
        cotangent: jax.Array,
        rings: Rings,
        slot: jax.Array,
        chunk: jax.Array,
        batch: Microbatch,
        context: Any,
        sums: Tree,
        only_if: jax.Array | None,
    ) -> tuple[jax.Array, Tree]:
        """Run a chunk backwards: its cotangent, and `sums` with the gradients of its weights.

        These are added only if `only_if` is true; None: they are.
        """
        made = self._chunk(chunk, rings, slot).backward(
            self._weights_of(chunk),
            self._residuals(rings),
            cotangent,
            batch,
            context,
            SliceGradients(self._first_in_stack(chunk), only_if),
            sums,
        )
        return made.x, made.layers

    def input_gradient(
        self,
        cotangent: jax.Array,
        rings: Rings,
        slot: jax.Array,
        stashed: Rings,
        stashed_slot: jax.Array,
        chunk: jax.Array,
        batch: Microbatch,
        context: Any,
    ) -> tuple[jax.Array, Rings]:
        """Run the first half of `backward`: the cotangent, and the rings of the stash."""
        made = self._chunk(chunk, rings, slot, stashed, stashed_slot).input_gradient(
            self._weights_of(chunk), self._residuals(rings), cotangent, batch, context
        )
        return made.x, made.layers[0]

    def weight_gradients(
        self,
        rings: Rings,
        slot: jax.Array,
        stashed: Rings,
        stashed_slot: jax.Array,
        chunk: jax.Array,
        context: Any,
        sums: Tree,
    ) -> Tree:
        """Run the second half: `sums` with the gradients of a chunk's weights."""
        added: Tree = self._chunk(chunk, rings, slot, stashed, stashed_slot).weight_gradients(
            self._weights_of(chunk),
            self._residuals(rings),
            [stashed],
            context,
            SliceGradients(self._first_in_stack(chunk)),
            sums,
        )
        return added

    def _chunk(
        self,
        number: jax.Array,
        rings: Rings | None = None,
        slot: jax.Array | None = None,
        stashed: Rings | None = None,
        stashed_slot: jax.Array | None = None,
    ) -> Chunk:
        """Return one of the stage's chunks, with the slots of the rings that it reads or writes."""
        number = jnp.maximum(number, 0)
        count = jnp.int32(self.max_layers_per_chunk) if self._even else self._counts[number]
        layers = Layers((Span(count, self._functions.layer),), self._firsts[number])
        if rings is not None and slot is not None:
            layers = dataclasses.replace(layers, store=RingStore(rings, slot, self.residuals))
        if stashed is not None and stashed_slot is not None:
            assert self.stashed is not None, "the backward must be split"
            store = RingStore(stashed, stashed_slot, self.stashed)
            layers = dataclasses.replace(layers, stash_store=store, split=self.stashed.split)
        return Chunk(self._functions, layers)

    def _first_in_stack(self, chunk: jax.Array) -> jax.Array:
        """Return where the first layer of a chunk lies among the stage's weights."""
        return jnp.maximum(chunk, 0) * self.max_layers_per_chunk

    def _weights_of(self, chunk: jax.Array) -> ChunkWeights:
        source = StackedWeights(self._weights, self._first_in_stack(chunk))
        return ChunkWeights({}, [LayerWeights(source)], {})

    def _residuals(self, rings: Rings) -> ChunkResiduals:
        balance = None if self.balance is None else zeros_of(self.balance)
        return ChunkResiduals([rings], balance)
