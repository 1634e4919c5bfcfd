"""The layers that one stage holds: a chunk of them forwards, backwards, or for their weights.

Each pass is a loop over the layers of a chunk that reads and writes rings in place. Chunks may have
different numbers of layers: the loop then has a length that the stage knows and the program does
not.
"""

import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.models.chunk.layer_scan import add_at, forward_layer, layer_slice
from geojax.models.chunk.residuals import Residuals
from geojax.models.parallel.varying import vary_over, varying_axes, zeros_of
from geojax.models.parameters import Parameters
from geojax.pipeline.execution.ring_buffers import get_layer, put_layer, typed_like
from geojax.pipeline.execution.split_backward import SplitBackward
from geojax.pipeline.execution.stage_functions import Microbatch, StageFunctions, StageWeights
from geojax.pipeline.schedule import Placement

Tree = TypeVar("Tree")


class _Chunk(NamedTuple):
    """One of the stage's chunks."""

    length: jax.Array
    """How many layers it has."""
    first_layer: jax.Array
    """The number of the first of them in the whole model."""
    first_row: jax.Array
    """Where that one lies among the stage's weights."""


class StageLayers:
    """The layers of one stage, in one trace of the program."""

    def __init__(
        self,
        functions: StageFunctions,
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
            microbatch: any; its types count.
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
        """A stream between layers: what it varies over no layer changes."""
        of_layer = jax.eval_shape(self._forward, self._layer, self.stream, stage, self._context)
        (_, self.balance), self.residuals = of_layer
        """Of one layer: its balance losses, and what its forward keeps."""
        self._split = self._split_layer() if split else None

    @property
    def held(self) -> list[Any]:
        """What the first half of one layer's split backward leaves for the second."""
        split = self._split
        if split is None:
            return []

        def held(saved: list[jax.Array], again: Any, cotangents: Any) -> list[jax.Array]:
            return split.input_gradient(saved, again, cotangents)[1]

        made: list[Any] = jax.eval_shape(held, *self._backward_types())
        return made

    def _count_layers(self, placement: Placement, layers_per_chunk: tuple[int, ...]) -> None:
        assert len(layers_per_chunk) == placement.chunks, "one number of layers for each chunk"
        self.rows_per_chunk = max(layers_per_chunk)
        """Of the weights: those of a shorter chunk are filled up."""
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

    def _backward_types(self) -> tuple[Any, Any, Any]:
        again = (self._layer, self._stage, self._context)
        return self.residuals.saved, again, (self.stream, self.balance)

    def _split_layer(self) -> SplitBackward:
        made: list[SplitBackward] = []

        def trace(saved: list[jax.Array], again: Any, cotangents: Any) -> None:
            residuals = Residuals(saved, self.residuals.rebuild)
            made.append(SplitBackward.of(residuals, again, cotangents))

        jax.eval_shape(trace, *self._backward_types())
        return made[0]

    def typed(self, x: jax.Array) -> jax.Array:
        """`x` typed as a stream between layers."""
        return typed_like(x, self.stream)

    def forward(
        self,
        x: jax.Array,
        rings: list[jax.Array],
        slot: jax.Array,
        chunk: jax.Array,
        context: Any,
    ) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
        """`x` behind a chunk; the sum of its layers' balances; and the rings with residuals."""
        own = self._chunk(chunk)

        def body(index: jax.Array, carry: Any) -> Any:
            x, total, rings = carry
            weights, number = self._at(own, index)
            (x, balance), made = self._forward(weights, x, number, context)
            assert len(made.saved) == len(rings), "a layer keeps the same whenever it is traced"
            rings = _put_all(rings, made.saved, slot, index)
            if total is not None:
                total = typed_like(total + balance, total)
            return self.typed(x), total, rings

        balance = None if self.balance is None else zeros_of(self.balance)
        x, balance, rings = lax.fori_loop(jnp.int32(0), own.length, body, (x, balance, rings))
        return x, balance, rings

    def forward_only(self, x: jax.Array, chunk: jax.Array, context: Any) -> jax.Array:
        """`x` behind a chunk; nothing is kept."""
        own = self._chunk(chunk)

        def body(index: jax.Array, x: jax.Array) -> jax.Array:
            weights, number = self._at(own, index)
            return self.typed(self._functions.layer(weights, x, number, context)[0])

        return lax.fori_loop(jnp.int32(0), own.length, body, x)

    def backward(
        self,
        cotangent: jax.Array,
        rings: list[jax.Array],
        slot: jax.Array,
        chunk: jax.Array,
        microbatch: Microbatch,
        context: Any,
        sums: Tree,
        valid: jax.Array | None,
    ) -> tuple[jax.Array, Tree]:
        """The cotangent before a chunk, and `sums` with the gradients of its weights.

        These are added only if it is `valid`; None: it is.
        """
        own = self._chunk(chunk)
        of_balance = self._balance_cotangent(microbatch)

        def body(turn: jax.Array, carry: Any) -> Any:
            cotangent, sums = carry
            index = own.length - 1 - turn
            saved, again = self._kept(own, index, rings, slot, context)
            gradient, cotangent = Residuals(saved, self.residuals.rebuild).backward(
                (cotangent, of_balance), again
            )
            if valid is not None:
                gradient = jax.tree.map(lambda leaf: jnp.where(valid, leaf, 0), gradient)
            return self.typed(cotangent), _add_row(sums, own.first_row + index, gradient)

        return lax.fori_loop(jnp.int32(0), own.length, body, (cotangent, sums))

    def backward_of_input(
        self,
        cotangent: jax.Array,
        rings: list[jax.Array],
        slot: jax.Array,
        held: list[jax.Array],
        held_slot: jax.Array,
        chunk: jax.Array,
        microbatch: Microbatch,
        context: Any,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The first half of `backward`: the cotangent, and the rings of what is held."""
        split = self._split
        assert split is not None, "the backward is split"
        own = self._chunk(chunk)
        of_balance = self._balance_cotangent(microbatch)

        def body(turn: jax.Array, carry: Any) -> Any:
            cotangent, held = carry
            index = own.length - 1 - turn
            saved, again = self._kept(own, index, rings, slot, context)
            cotangent, made = split.input_gradient(saved, again, (cotangent, of_balance))
            return self.typed(cotangent), _put_all(held, made, held_slot, index)

        return lax.fori_loop(jnp.int32(0), own.length, body, (cotangent, held))

    def backward_of_weights(
        self,
        rings: list[jax.Array],
        slot: jax.Array,
        held: list[jax.Array],
        held_slot: jax.Array,
        chunk: jax.Array,
        context: Any,
        sums: Tree,
    ) -> Tree:
        """The second half: `sums` with the gradients of a chunk's weights."""
        split = self._split
        assert split is not None, "the backward is split"
        own = self._chunk(chunk)

        def body(index: jax.Array, sums: Tree) -> Tree:
            saved, again = self._kept(own, index, rings, slot, context)
            made = [get_layer(ring, held_slot, index) for ring in held]
            gradient = split.weight_gradients(saved, again, made)
            return _add_row(sums, own.first_row + index, gradient)

        return lax.fori_loop(jnp.int32(0), own.length, body, sums)

    def _kept(
        self, own: _Chunk, index: jax.Array, rings: list[jax.Array], slot: jax.Array, context: Any
    ) -> tuple[list[jax.Array], Any]:
        """What a layer's forward has saved, and what its backward takes again."""
        return [get_layer(ring, slot, index) for ring in rings], (*self._at(own, index), context)

    def _balance_cotangent(self, microbatch: Microbatch) -> jax.Array | None:
        weigh = self._functions.balance
        if self.balance is None or weigh is None:
            return None
        value, backward = jax.vjp(lambda x: weigh(x, microbatch), zeros_of(self.balance))
        (cotangent,) = backward(jnp.ones_like(value))
        return vary_over(cotangent, varying_axes(self.balance))

    def _forward(
        self, weights: Parameters, x: jax.Array, number: jax.Array, context: Any
    ) -> tuple[tuple[jax.Array, jax.Array | None], Residuals]:
        return forward_layer(self._functions.layer, x, (weights, number, context))

    def _chunk(self, number: jax.Array) -> _Chunk:
        number = jnp.maximum(number, 0)
        count = jnp.int32(self.rows_per_chunk) if self._even else self._counts[number]
        return _Chunk(count, self._firsts[number], number * self.rows_per_chunk)

    def _at(self, chunk: _Chunk, index: jax.Array) -> tuple[Parameters, jax.Array]:
        """The weights and the number of one layer of a chunk."""
        return layer_slice(self._weights, chunk.first_row + index), chunk.first_layer + index


def _put_all(
    rings: list[jax.Array], leaves: list[jax.Array], slot: jax.Array, index: jax.Array
) -> list[jax.Array]:
    return [put_layer(ring, leaf, slot, index) for ring, leaf in zip(rings, leaves, strict=True)]


def _add_row(sums: Tree, row: jax.Array, gradient: Any) -> Tree:
    stacked = jax.tree.map(lambda leaf: leaf[None], gradient)
    added: Tree = add_at(sums, row, stacked)
    return jax.tree.map(typed_like, added, sums)
