"""The chunks that one stage holds: their passes, with residuals in ring buffers.

A `StageChunks` makes `Chunk`s whose number on the stage only the running program knows, and whose
stores are slots of rings that are updated in place. Chunks may have different numbers of layers:
their loops then have a length that the stage knows and the program does not.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives.axes import typed_like, vary_over, varying_axes, zeros_of
from geojax.models.chunk.chunk import (
    Chunk,
    ChunkResiduals,
    ChunkWeights,
    Microbatch,
    ModelFunctions,
)
from geojax.models.chunk.layer_io import (
    GradientSink,
    LayerWeights,
    OwnGradients,
    SliceGradients,
    StackedWeights,
    layer_slice,
    layers_slice,
)
from geojax.models.chunk.layer_scan import Layers, LayerSpan, forward_layer
from geojax.models.chunk.residuals import Residuals
from geojax.models.chunk.split_backward import SplitBackward, Stash
from geojax.models.declaration import Parameters
from geojax.pipeline.execution.ring_buffers import get_as, put_at
from geojax.pipeline.execution.ring_pool import RingLeaf, RingPool
from geojax.pipeline.execution.stage_weights import StageWeights
from geojax.pipeline.schedule import Placement

Tree = TypeVar("Tree")
Rings = list[jax.Array]
"""Ring buffers, each [rows, ...] (see `geojax.pipeline.execution.ring_pool`)."""


@dataclasses.dataclass(frozen=True)
class RingStore:
    """A store that keeps the values of a chunk's layers in rows of some rings."""

    rings: Rings
    rows: jax.Array
    """[layers, columns]: the rows of a layer's values."""
    leaves: tuple[RingLeaf, ...]
    """The ring and the column of each of these values."""
    example: Any
    """A pytree in the structure and types of one layer's values."""

    def start(self) -> Any:
        """Return the rings as they are."""
        return self.rings

    def put(self, stored: Any, index: jax.Array, value: Any) -> tuple[Any, None]:
        """Write into the rings, in place."""
        rings, rows = list(stored), layer_slice(self.rows, index)
        for (ring, column, *_), leaf in zip(self.leaves, jax.tree.leaves(value), strict=True):
            rings[ring] = put_at(rings[ring], leaf, rows[column])
        return rings, None

    def get(self, stored: Rings, index: jax.Array) -> Any:
        """Read from the rings."""
        rows = layer_slice(self.rows, index)
        types, structure = jax.tree.flatten(self.example)
        read = [
            get_as(stored[ring], rows[column], typed)
            for (ring, column, *_), typed in zip(self.leaves, types, strict=True)
        ]
        return jax.tree.unflatten(structure, read)


@dataclasses.dataclass(frozen=True)
class RingStash(RingStore):
    """A store of stashes, in the rings that the residuals are read from.

    The stash of a layer is written in the next iteration of the loop, before that reads: a ring
    that is read and written later in one iteration would be copied.
    """

    layers: jax.Array
    """The number of layers of the chunk."""

    def start(self) -> tuple[Rings, list[jax.Array]]:
        """Return the rings, and no more than a place for the stash of a layer."""
        return self.rings, zeros_of(jax.tree.leaves(self.example))

    def begin(
        self, stored: tuple[Rings, list[jax.Array]], index: jax.Array, residuals: Any
    ) -> tuple[tuple[Rings, list[jax.Array]], Rings]:
        """Write the stash of the layer before, which in the loop is the one behind `index`.

        The first layer has none before it, and writes where its own will be.
        """
        rings, stash = stored
        rings, _ = super().put(rings, jnp.minimum(index + 1, self.layers - 1), stash)
        return (rings, stash), rings

    def put(
        self, stored: tuple[Rings, list[jax.Array]], index: jax.Array, value: Any
    ) -> tuple[tuple[Rings, list[jax.Array]], None]:
        """Keep the stash for the next iteration."""
        rings, before = stored
        return (rings, jax.tree.map(typed_like, jax.tree.leaves(value), before)), None

    def finish(self, stored: tuple[Rings, list[jax.Array]], stacked: None) -> Rings:
        """Write the stash of the layer that the loop ended with."""
        rings, _ = super().put(stored[0], jnp.int32(0), stored[1])
        return rings


class HeldChunk(NamedTuple):
    """A chunk of one layer, which lies where ticks read and add to it while these run it.

    XLA copies a layer out of a stack at an index that it does not know, in every tick anew. To a
    slice of a stack it adds in a pass of its own, to an array in the product itself. A stage runs a
    chunk for as many microbatches in a row as there are stages: few ticks need another one.
    """

    number: jax.Array
    """The chunk's number on the stage, int32."""
    weights: Parameters
    """Stacked, of one layer."""
    sums: Parameters
    """The gradients of its weights so far, alike; those in the stack are older. Empty: they are in
    the stack alone."""

    @classmethod
    def of(cls, number: jax.Array, weights: Parameters, sums: Parameters) -> "HeldChunk":
        """Copy a chunk out of stacks of all chunks' weights and gradients."""
        return cls(number, layers_slice(weights, number, 1), layers_slice(sums, number, 1))

    def put_back(self, sums: Parameters) -> Parameters:
        """Return the stack of all chunks' gradients, with this one's; in place."""

        def put(stack: jax.Array, own: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(
                stack, own, self.number, axis=0, allow_negative_indices=False
            )

        stacks: Parameters = jax.tree.map(put, sums, self.sums)
        return stacks

    def turned_to(
        self, number: jax.Array, weights: Parameters, sums: Parameters
    ) -> tuple["HeldChunk", Parameters]:
        """Return a copy of chunk `number` if that is another one, in place.

        And the stack of all chunks' gradients, into which this one's have then been put back.
        """

        def turned() -> tuple[HeldChunk, Parameters]:
            stacks = self.put_back(sums)
            return HeldChunk.of(number, weights, stacks), stacks

        return _kept_if(number == self.number, (self, sums), turned)

    def renewed_if(self, number: jax.Array, weights: Parameters) -> "HeldChunk":
        """Return the chunk with weights that are new if it is this one, in place."""
        changed = number == self.number
        own = _kept_if(~changed, self.weights, lambda: layers_slice(weights, number, 1))
        return self._replace(weights=own)


def _kept_if(stays: jax.Array, held: Tree, replaced: Callable[[], Tree]) -> Tree:
    """Return `held` or else `replaced()` in its place.

    The branch that keeps is the first one: what a later branch only hands on, XLA copies if an
    earlier one writes there.
    """

    def typed() -> Tree:
        made: Tree = jax.tree.map(typed_like, replaced(), held)
        return made

    made: Tree = lax.cond(stays, lambda: held, typed)
    return made


class ChunkVisit(NamedTuple):
    """A microbatch's visit to one of the stage's chunks, forwards or backwards."""

    chunk: jax.Array
    """The chunk's number on the stage."""
    rows: jax.Array
    """[layers, columns]: the rows of the rings that it reads or writes (see `RingRows`)."""
    batch: Microbatch
    context: Any
    held: HeldChunk | None
    """None: the chunk's weights are read from the stage's."""


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
        # Of a split backward a loop of one layer would be unrolled, and the rings be copied.
        unrolled = split and max(layers_per_chunk) == 1
        self._static = len(set(layers_per_chunk)) == 1 and not unrolled
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
        self.pool = RingPool.of(
            self.residuals.saved,
            None if self.stashed is None else self.stashed.values,
            frozenset() if self.stashed is None else self.stashed.split.residuals_read_later,
        )
        """The rings for both."""

    def with_weights(self, layers: Parameters) -> "StageChunks":
        """Return the same chunks with other weights of the same types."""
        chunks = copy.copy(self)
        chunks._weights = layers
        return chunks

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
        self, x: jax.Array, rings: Rings, visit: ChunkVisit
    ) -> tuple[jax.Array, jax.Array | None, Rings]:
        """Run a chunk forwards: the stream, what its balance adds to the loss, and the rings."""
        balance = None if self.balance is None else zeros_of(self.balance)
        made = self._chunk(visit, rings).forward(
            self._weights_of(visit), x, visit.batch, visit.context, balance=balance
        )
        return made.x, made.balance_loss, made.residuals.layers[0]

    @property
    def unkept(self) -> Rings:
        """Rings of zeros, with rows for one chunk alone: `unkept_rows`."""
        return [zeros_of(leaf, self.max_layers_per_chunk) for leaf in self.pool.rings]

    @property
    def unkept_rows(self) -> jax.Array:
        """The rows of a chunk in `unkept`: [layers, 1]."""
        return jnp.arange(self.max_layers_per_chunk)[:, None]

    def keep(self, rings: Rings, rows: jax.Array, residuals: Rings) -> Rings:
        """Write one chunk's residuals, each [layers, ...], into `rows` [layers, 1] of the rings."""
        for layer in range(self.max_layers_per_chunk):
            pairs = zip(rings, residuals, strict=True)
            rings = [put_at(ring, kept[layer], rows[layer, 0]) for ring, kept in pairs]
        return rings

    def forward_only(self, x: jax.Array, visit: ChunkVisit) -> jax.Array:
        """Run a chunk forwards and keep nothing."""
        weights = self._weights_of(visit)
        return self._chunk(visit).forward_only(weights, x, visit.batch, visit.context)[0]

    def backward(
        self,
        cotangent: jax.Array,
        rings: Rings,
        visit: ChunkVisit,
        sums: Tree,
        only_if: jax.Array | None,
    ) -> tuple[jax.Array, Tree]:
        """Run a chunk backwards: its cotangent, and `sums` with the gradients of its weights.

        These are added only if `only_if` is true; None: they are.
        """
        made = self._chunk(visit, rings).backward(
            self._weights_of(visit),
            self._residuals(rings),
            cotangent,
            visit.batch,
            visit.context,
            self._sink(visit, only_if),
            sums,
        )
        return made.x, made.layers

    def input_gradient(
        self, cotangent: jax.Array, rings: Rings, visit: ChunkVisit
    ) -> tuple[jax.Array, Rings]:
        """Run the first half of `backward`: the cotangent, and the rings with the stash."""
        weights, residuals = self._weights_of(visit), self._residuals(rings)
        made = self._chunk(visit, rings).input_gradient(
            weights, residuals, cotangent, visit.batch, visit.context
        )
        return made.x, made.layers[0]

    def weight_gradients(self, rings: Rings, visit: ChunkVisit, sums: Tree) -> Tree:
        """Run the second half: `sums` with the gradients of a chunk's weights."""
        sink = self._sink(visit)
        weights, residuals = self._weights_of(visit), self._residuals(rings)
        added: Tree = self._chunk(visit, rings).weight_gradients(
            weights, residuals, [rings], visit.context, sink, sums
        )
        return added

    def _chunk(self, visit: ChunkVisit, rings: Rings | None = None) -> Chunk:
        """Return one of the stage's chunks, with the rings that it reads or writes."""
        number = jnp.maximum(visit.chunk, 0)
        count: int | jax.Array = self.max_layers_per_chunk
        if not self._static:
            count = self._counts[number]
        elif count > 1 or rings is None:  # one layer is in no loop of a tick
            count = jnp.int32(count)
        layers = Layers((LayerSpan(count, self._functions.layer),), self._firsts[number])
        if rings is None:
            return Chunk(self._functions, layers)
        leaves, saved = self.pool.leaves, len(self.residuals.saved)
        store = RingStore(rings, visit.rows, leaves[:saved], self.residuals)
        layers = dataclasses.replace(layers, store=store)
        if self.stashed is not None:
            stash = RingStash(rings, visit.rows, leaves[saved:], self.stashed, jnp.asarray(count))
            layers = dataclasses.replace(layers, stash_store=stash, split=self.stashed.split)
        return Chunk(self._functions, layers)

    def _first_in_stack(self, chunk: jax.Array) -> jax.Array:
        """Return where the first layer of a chunk lies among the stage's weights."""
        return jnp.maximum(chunk, 0) * self.max_layers_per_chunk

    def _sink(self, visit: ChunkVisit, only_if: jax.Array | None = None) -> GradientSink:
        if visit.held is None or not visit.held.sums:
            return SliceGradients(self._first_in_stack(visit.chunk), only_if)
        assert only_if is None, "programs that hold chunks have branches"
        return OwnGradients()

    def _weights_of(self, visit: ChunkVisit) -> ChunkWeights:
        source = StackedWeights(self._weights, self._first_in_stack(visit.chunk))
        if visit.held is not None:
            source = StackedWeights(visit.held.weights)
        return ChunkWeights({}, [LayerWeights(source)], {})

    def _residuals(self, rings: Rings) -> ChunkResiduals:
        balance = None if self.balance is None else zeros_of(self.balance)
        return ChunkResiduals([rings], balance)
