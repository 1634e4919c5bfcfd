"""One SPMD program that walks a table of ticks: a loop with a forward and a backward in each turn.

    tick t    send what tick t-1 made (delayed channels)
              forward of a chunk: stream and residuals of a microbatch
              backward of a chunk: its cotangent and, summed, the gradients of its weights
              send what this tick made (the other channels)

A delayed message and the work of its tick do not wait for each other. Residuals lie in rings of
slots that are updated in place. Every stage runs the same program on its own column of the table; a
stage without work either takes a branch that does nothing, or (`branch_free`) computes on what
nobody reads. Buffers begin as NaN, so that what leaks from a bubble is seen.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives import after
from geojax.models.layer_scan import add_at, layer_slice
from geojax.models.residuals import Residuals, forward
from geojax.models.varying import vary_over, varying_axes, zeros_of
from geojax.pipeline.rings import behind, get, get_layer, nan_of, put, put_layer, typed_like
from geojax.pipeline.schedule import Kind
from geojax.pipeline.split_backward import SplitBackward
from geojax.pipeline.stage_functions import (
    Microbatch,
    PipelineGradients,
    StageFunctions,
    StageWeights,
)
from geojax.pipeline.tick_program import NOTHING, Segment, TickProgram

Tree = TypeVar("Tree")

Cells = dict[str, jax.Array]
"""One tick's row of a stage's column of the table: int32 scalars."""


class _State(NamedTuple):
    """What passes from tick to tick on a stage."""

    inputs: jax.Array
    """[slots, *stream]: see `geojax.pipeline.tick_program`."""
    cotangents: jax.Array
    residuals: list[jax.Array]
    """Each [slots, layers of a chunk, ...]."""
    held: list[jax.Array]
    """So is each of these; there are none where the backward is not split."""
    made: dict[str, jax.Array]
    """By kind of action what the last tick made, for the delayed channels."""
    loss: jax.Array
    balance: jax.Array | None
    sums: StageWeights
    """The gradients so far."""


@dataclasses.dataclass(frozen=True, eq=False)
class Executor:
    """A pipeline of one model, to be run inside a step's `shard_map`."""

    program: TickProgram
    functions: StageFunctions
    axes: tuple[str, ...]
    """The mesh axes that number the stages."""
    layers_per_chunk: tuple[int, ...]
    """In the model's order."""
    sum_dtype: Any
    """Of the gradients' sums."""

    def gradients(self, weights: StageWeights, microbatches: Microbatch) -> PipelineGradients:
        """Loss and gradients of all microbatches.

        Args:
            weights: this rank's, typed as varying over the stage axes and over all axes along which
                ranks see other rows.
            microbatches: of this rank, each leaf [microbatches, rows, ...].
        """
        return _Run(self, weights, microbatches).gradients()

    def loss(self, weights: StageWeights, microbatches: Microbatch) -> jax.Array:
        """The sum of the losses of all microbatches on the last stage, forwards only; elsewhere 0.

        Arguments are those of `gradients`.
        """
        return _Run(self, weights, microbatches).loss()


class _Run:
    """One trace of the program."""

    def __init__(self, executor: Executor, weights: StageWeights, microbatches: Microbatch):
        self._functions, self._program = executor.functions, executor.program
        self._axes, self._sum_dtype = executor.axes, executor.sum_dtype
        self._weights, self._microbatches = weights, microbatches
        self._stage = lax.axis_index(self._axes)
        self._placement = self._program.ticks.schedule.placement
        self._count_layers(executor.layers_per_chunk)
        microbatch = self._microbatch(self._stage * 0)
        self._stream = self._stream_type(microbatch)
        layer = jax.eval_shape(
            self._layer_forward,
            layer_slice(weights.layers, 0),
            self._stream,
            self._stage,
            jax.eval_shape(self._functions.context, microbatch),
        )
        (_, self._balance), self._layer_residuals = layer
        self._split = self._split_layer(microbatch)

    def _count_layers(self, layers_per_chunk: tuple[int, ...]) -> None:
        """For each chunk of this stage the number of its layers and that of the first of them."""
        placement = self._placement
        assert len(layers_per_chunk) == placement.chunks, "one number of layers for each chunk"
        self._rows_per_chunk = max(layers_per_chunk)
        shape = (placement.stages, placement.chunks_per_stage)
        counts, firsts = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for stage in range(placement.stages):
            for number, chunk in enumerate(placement.chunks_of(stage)):
                counts[stage, number] = layers_per_chunk[chunk]
                firsts[stage, number] = sum(layers_per_chunk[:chunk])
        self._firsts = jnp.asarray(firsts)[self._stage]
        self._counts = jnp.asarray(counts)[self._stage]
        self._even = len(set(layers_per_chunk)) == 1

    def _split_layer(self, microbatch: Microbatch) -> SplitBackward | None:
        """The two halves of a layer's backward, where the schedule has them apart."""
        if not self._program.ticks.schedule.split_backward:
            return None
        made: list[SplitBackward] = []

        def trace(saved: list[jax.Array], cotangents: Any, number: jax.Array) -> None:
            residuals = Residuals(saved, self._layer_residuals.rebuild)
            again = (layer_slice(self._weights.layers, number), number)
            context = self._functions.context(self._microbatch(number))
            made.append(SplitBackward.of(residuals, (*again, context), cotangents))

        cotangents = (self._stream, self._balance)
        jax.eval_shape(trace, self._layer_residuals.saved, cotangents, self._stage)
        return made[0]

    def _held_types(self) -> list[Any]:
        """Of what the first half of a layer's backward leaves for the second."""
        split = self._split
        if split is None:
            return []

        def held(saved: list[jax.Array], cotangents: Any, number: jax.Array) -> list[Any]:
            context = self._functions.context(self._microbatch(number))
            again = (layer_slice(self._weights.layers, number), number, context)
            return split.input_gradient(saved, again, cotangents)[1]

        cotangents = (self._stream, self._balance)
        return jax.eval_shape(held, self._layer_residuals.saved, cotangents, self._stage)

    def _stream_type(self, microbatch: Microbatch) -> jax.ShapeDtypeStruct:
        """A stream as it is between layers: what it varies over no layer changes."""
        stream = jax.eval_shape(self._functions.embed, self._weights.first, microbatch)
        context = jax.eval_shape(self._functions.context, microbatch)
        layer = layer_slice(self._weights.layers, 0)
        axes = varying_axes(stream) | frozenset(self._axes)
        while True:
            typed = jax.eval_shape(functools.partial(vary_over, axes=axes), stream)
            behind = jax.eval_shape(self._layer_forward, layer, typed, self._stage, context)[0][0]
            if varying_axes(behind) <= axes:
                return typed
            axes |= varying_axes(behind)

    def gradients(self) -> PipelineGradients:
        own = self._own_columns()
        state = self._start()
        for segment in self._program.segments:
            ticks = slice(segment.first, segment.first + segment.count)
            cells = {name: column[ticks] for name, column in own.items()}
            state, _ = lax.scan(functools.partial(self._tick, segment), state, cells)
        balance, sums = after((state.balance, state.sums), state.loss)
        return PipelineGradients(state.loss, balance, sums)

    def _own_columns(self) -> dict[str, jax.Array]:
        """This stage's column of the table, by name: [ticks]."""
        return {
            name: lax.dynamic_index_in_dim(jnp.asarray(column), self._stage, 1, keepdims=False)
            for name, column in self._program.columns.items()
        }

    def loss(self) -> jax.Array:
        own = self._own_columns()
        channels = self._program.channels
        numbers = [n for n, channel in enumerate(channels) if channel.kind is Kind.FORWARD]
        microbatch = jax.eval_shape(self._microbatch, self._stage)
        loss = jax.eval_shape(self._functions.head, self._weights.last, self._stream, microbatch)
        start = (
            nan_of(self._stream, max(self._program.slots["inputs"], 1)),
            nan_of(self._stream),
            vary_over(zeros_of(loss), frozenset(self._axes)),
        )

        def tick(state: tuple[jax.Array, jax.Array, jax.Array], cells: Cells) -> Any:
            inputs, made, loss = state
            sent = {n: after(made, loss) for n in numbers if channels[n].delayed}
            arrived = {n: self._send(n, stream) for n, stream in sent.items()}
            before = [loss, *arrived.values()]
            inputs, made, loss = self._forward_only(inputs, loss, cells, before)
            made = after(made, loss)
            arrived |= {n: self._send(n, made) for n in numbers if not channels[n].delayed}
            for number, stream in arrived.items():
                inputs = put(inputs, stream, behind(cells[f"channel.{number}"], made))
            loss = functools.reduce(after, arrived.values(), loss)
            return (inputs, made, loss), None

        (_, _, loss), _ = lax.scan(tick, start, own)
        return loss

    def _forward_only(
        self, inputs: jax.Array, loss: jax.Array, cells: Cells, before: list[jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A chunk forwards, and the head behind the last one: inputs, the stream, and the loss."""
        microbatch = functools.reduce(after, before, self._microbatch(cells["F.microbatch"]))
        x = self._first_stream(inputs, cells, microbatch, before)
        count, first_layer, first_row = self._of_chunk(cells["F.chunk"])
        context = self._functions.context(microbatch)

        def body(index: jax.Array, x: jax.Array) -> jax.Array:
            weights = layer_slice(self._weights.layers, first_row + index)
            x, _ = self._functions.layer(weights, x, first_layer + index, context)
            return self._typed(x)

        x = lax.fori_loop(jnp.int32(0), count, body, x)
        is_last = (cells["F.microbatch"] != NOTHING) & (cells["F.last"] == 1)
        loss = lax.cond(
            is_last,
            lambda x: typed_like(
                loss + self._functions.head(self._weights.last, x, microbatch), loss
            ),
            lambda x: loss,
            x,
        )
        if self._hands_over:
            slot = jnp.where(cells["F.last"] == 1, NOTHING, cells["F.output"])
            inputs = put(inputs, x, slot)
        return inputs, x, loss

    def _first_stream(
        self, inputs: jax.Array, cells: Cells, microbatch: Microbatch, before: list[jax.Array]
    ) -> jax.Array:
        """What goes into a chunk: the embedding, or what has arrived."""
        arrived = functools.reduce(after, before, get(inputs, cells["F.input"]))
        return lax.cond(
            cells["F.first"] == 1,
            lambda: self._typed(self._functions.embed(self._weights.first, microbatch)),
            lambda: arrived,
        )

    def _start(self) -> _State:
        slots = self._program.slots
        microbatch = jax.eval_shape(self._microbatch, self._stage)
        loss = jax.eval_shape(self._functions.head, self._weights.last, self._stream, microbatch)
        balance = None
        if self._balance is not None:
            assert self._functions.balance is not None, "layers have a balance: it is weighed"
            balance = jax.eval_shape(self._functions.balance, self._balance, microbatch)
        delayed = {channel.kind.value for channel in self._program.channels if channel.delayed}
        axes = frozenset(self._axes)
        return _State(
            nan_of(self._stream, max(slots["inputs"], 1)),
            nan_of(self._stream, max(slots["cotangents"], 1)),
            [
                nan_of(leaf, slots["residuals"], self._rows_per_chunk)
                for leaf in self._layer_residuals.saved
            ],
            [nan_of(leaf, slots["held"], self._rows_per_chunk) for leaf in self._held_types()],
            {kind: nan_of(self._stream) for kind in sorted(delayed)},
            vary_over(zeros_of(loss), axes),
            None if balance is None else vary_over(zeros_of(balance), axes),
            zeros_of(self._weights, dtype=self._sum_dtype),
        )

    def _tick(self, segment: Segment, state: _State, cells: Cells) -> tuple[_State, None]:
        channels = self._program.channels
        arrived = {
            number: self._send(number, after(state.made[channels[number].kind.value], state.loss))
            for number in segment.channels
            if channels[number].delayed
        }
        made = {}
        if Kind.FORWARD in segment.kinds:
            state, made["F"] = self._forward(state, cells, [state.loss, *arrived.values()])
        if Kind.BACKWARD in segment.kinds:
            tokens = [state.loss, *arrived.values(), *made.values()]
            state, made["B"] = self._backward(state, cells, tokens)
        if Kind.WEIGHT in segment.kinds:
            state = self._weights_back(
                state, cells, [state.loss, *arrived.values(), *made.values()]
            )
        ordered = dict(made)
        for kind in made:
            for other in made.values():
                ordered[kind] = after(ordered[kind], other)
        for number in segment.channels:
            if not channels[number].delayed:
                arrived[number] = self._send(number, ordered[channels[number].kind.value])
        inputs, cotangents = state.inputs, state.cotangents
        for number, stream in arrived.items():
            slot = functools.reduce(behind, made.values(), cells[f"channel.{number}"])
            if channels[number].kind is Kind.FORWARD:
                inputs = put(inputs, stream, slot)
            else:
                cotangents = put(cotangents, stream, slot)
        kept = state.made | {kind: made[kind] for kind in state.made if kind in made}
        # What the next tick begins with waits for all of this one: a loop of one turn is no loop.
        loss = functools.reduce(after, [*made.values(), *arrived.values()], state.loss)
        return state._replace(inputs=inputs, cotangents=cotangents, made=kept, loss=loss), None

    def _send(self, number: int, stream: jax.Array) -> jax.Array:
        return lax.ppermute(stream, self._axes, self._program.channels[number].pairs)

    def _forward(
        self, state: _State, cells: Cells, before: list[jax.Array]
    ) -> tuple[_State, jax.Array]:
        """A chunk forwards, if the tick has one for this stage: the state, and the stream."""
        valid = cells["F.microbatch"] != NOTHING

        def do(state: _State) -> tuple[_State, jax.Array]:
            microbatch = functools.reduce(after, before, self._microbatch(cells["F.microbatch"]))
            x = self._first_stream(state.inputs, cells, microbatch, before)
            x, balance, residuals = self._layers(x, state.residuals, cells, microbatch)
            total = state.balance
            if balance is not None and total is not None and self._functions.balance is not None:
                added = jnp.where(valid, self._functions.balance(balance, microbatch), 0)
                total = typed_like(total + added, total)
            state = state._replace(residuals=residuals, balance=total)
            cotangents = put(
                state.cotangents, x, jnp.where(cells["F.last"] == 1, cells["F.output"], NOTHING)
            )
            inputs = state.inputs
            if self._hands_over:
                slot = jnp.where(cells["F.last"] == 1, NOTHING, cells["F.output"])
                inputs = put(inputs, x, slot)
            return state._replace(inputs=inputs, cotangents=cotangents), x

        return self._maybe(valid, do, state)

    def _layers(
        self, x: jax.Array, residuals: list[jax.Array], cells: Cells, microbatch: Microbatch
    ) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
        """`x` through the layers of a chunk; their balances; and the rings with their residuals."""
        count, first_layer, first_row = self._of_chunk(cells["F.chunk"])
        slot = jnp.maximum(cells["F.residuals"], 0)
        context = self._functions.context(microbatch)

        def body(index: jax.Array, carry: Any) -> Any:
            x, total, rings = carry
            weights = layer_slice(self._weights.layers, first_row + index)
            (x, balance), made = self._layer_forward(weights, x, first_layer + index, context)
            assert len(made.saved) == len(rings), "a layer keeps the same whenever it is traced"
            rings = [
                put_layer(ring, leaf, slot, index)
                for ring, leaf in zip(rings, made.saved, strict=True)
            ]
            if total is not None:
                total = typed_like(total + balance, total)
            return self._typed(x), total, rings

        start = None if self._balance is None else zeros_of(self._balance)
        if start is not None:
            start = vary_over(start, varying_axes(self._stream) & varying_axes(self._balance))
        x, balance, rings = lax.fori_loop(jnp.int32(0), count, body, (x, start, residuals))
        return x, balance, rings

    def _backward(
        self, state: _State, cells: Cells, before: list[jax.Array]
    ) -> tuple[_State, jax.Array]:
        """A chunk backwards, if the tick has one for this stage: the state, and its cotangent."""
        valid = cells["B.microbatch"] != NOTHING

        def do(state: _State) -> tuple[_State, jax.Array]:
            microbatch = functools.reduce(after, before, self._microbatch(cells["B.microbatch"]))
            arrived = functools.reduce(after, before, get(state.cotangents, cells["B.input"]))
            is_last = valid & (cells["B.last"] == 1)
            cotangent, loss, last = lax.cond(
                is_last, self._head, lambda x, loss, sums, _: (x, loss, sums),
                arrived, state.loss, state.sums.last, microbatch,
            )  # fmt: skip
            if self._split is None:
                cotangent, layers = self._layers_back(cotangent, state, cells, microbatch, valid)
                held = state.held
            else:
                layers = state.sums.layers
                cotangent, held = self._inputs_back(
                    self._split, cotangent, state, cells, microbatch
                )
            is_first = valid & (cells["B.first"] == 1)
            first = lax.cond(
                is_first, self._embed_back, lambda x, sums, _: sums,
                cotangent, state.sums.first, microbatch,
            )  # fmt: skip
            cotangents = state.cotangents
            if self._hands_over:
                cotangents = put(cotangents, cotangent, cells["B.output"])
            sums = StageWeights(first, layers, last)
            state = state._replace(cotangents=cotangents, held=held, loss=loss, sums=sums)
            return state, cotangent

        return self._maybe(valid, do, state)

    def _head(
        self, x: jax.Array, loss: jax.Array, sums: Any, microbatch: Microbatch
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The head, forwards and backwards: the cotangent of its input `x`, and all sums."""
        head = self._functions.head
        total, backward = jax.vjp(lambda last, x: head(last, x, microbatch), self._weights.last, x)
        gradient, cotangent = backward(jnp.ones_like(total))
        return self._typed(cotangent), typed_like(loss + total, loss), _add(sums, gradient)

    def _embed_back(self, cotangent: jax.Array, sums: Any, microbatch: Microbatch) -> Any:
        stream, backward = jax.vjp(
            lambda first: self._functions.embed(first, microbatch), self._weights.first
        )
        missing = varying_axes(cotangent) - varying_axes(stream)
        assert not missing, f"a stream that varies over {missing} after the first layer, not before"
        (gradient,) = backward(cotangent)
        return _add(sums, gradient)

    def _layers_back(
        self,
        cotangent: jax.Array,
        state: _State,
        cells: Cells,
        microbatch: Microbatch,
        valid: jax.Array,
    ) -> tuple[jax.Array, Any]:
        """The layers of a chunk backwards: the cotangent before them, and the gradients' sums."""
        count, first_layer, first_row = self._of_chunk(cells["B.chunk"])
        slot = jnp.maximum(cells["B.residuals"], 0)
        context = self._functions.context(microbatch)
        of_balance = self._balance_cotangent(microbatch)

        def body(turn: jax.Array, carry: Any) -> Any:
            cotangent, sums = carry
            index = count - 1 - turn
            row = first_row + index
            weights = layer_slice(self._weights.layers, row)
            saved = [get_layer(ring, slot, index) for ring in state.residuals]
            residuals = Residuals(saved, self._layer_residuals.rebuild)
            gradient, cotangent = residuals.backward(
                (cotangent, of_balance), again=(weights, first_layer + index, context)
            )
            if self._program.branch_free:
                gradient = jax.tree.map(lambda leaf: jnp.where(valid, leaf, 0), gradient)
            sums = _add_row(sums, row, gradient)
            return self._typed(cotangent), sums

        carry = (cotangent, state.sums.layers)
        cotangent, sums = lax.fori_loop(jnp.int32(0), count, body, carry)
        return cotangent, sums

    def _inputs_back(
        self,
        split: SplitBackward,
        cotangent: jax.Array,
        state: _State,
        cells: Cells,
        microbatch: Microbatch,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The first half of `_layers_back`: the cotangent, and the rings with what is held."""
        count, first_layer, first_row = self._of_chunk(cells["B.chunk"])
        slot, held_slot = (jnp.maximum(cells[f"B.{ring}"], 0) for ring in ("residuals", "held"))
        context = self._functions.context(microbatch)
        of_balance = self._balance_cotangent(microbatch)

        def body(turn: jax.Array, carry: Any) -> Any:
            cotangent, rings = carry
            index = count - 1 - turn
            weights = layer_slice(self._weights.layers, first_row + index)
            saved = [get_layer(ring, slot, index) for ring in state.residuals]
            again = (weights, first_layer + index, context)
            cotangent, held = split.input_gradient(saved, again, (cotangent, of_balance))
            rings = [
                put_layer(ring, leaf, held_slot, index)
                for ring, leaf in zip(rings, held, strict=True)
            ]
            return self._typed(cotangent), rings

        cotangent, rings = lax.fori_loop(jnp.int32(0), count, body, (cotangent, state.held))
        return cotangent, rings

    def _weights_back(self, state: _State, cells: Cells, before: list[jax.Array]) -> _State:
        """The gradients of a chunk's weights, if the tick has them for this stage."""
        split = self._split
        assert split is not None, "the backward is split"

        def do(state: _State) -> _State:
            microbatch = functools.reduce(after, before, self._microbatch(cells["W.microbatch"]))
            count, first_layer, first_row = self._of_chunk(cells["W.chunk"])
            slot, held_slot = cells["W.residuals"], cells["W.held"]
            context = self._functions.context(microbatch)

            def body(index: jax.Array, sums: Any) -> Any:
                weights = layer_slice(self._weights.layers, first_row + index)
                saved = [get_layer(ring, slot, index) for ring in state.residuals]
                held = [get_layer(ring, held_slot, index) for ring in state.held]
                again = (weights, first_layer + index, context)
                gradient = split.weight_gradients(saved, again, held)
                return _add_row(sums, first_row + index, gradient)

            sums = lax.fori_loop(jnp.int32(0), count, body, state.sums.layers)
            loss = after(state.loss, jax.tree.leaves(sums)[0])
            return state._replace(loss=loss, sums=state.sums._replace(layers=sums))

        return lax.cond(cells["W.microbatch"] != NOTHING, do, lambda state: state, state)

    def _balance_cotangent(self, microbatch: Microbatch) -> jax.Array | None:
        if self._balance is None or self._functions.balance is None:
            return None
        weigh = self._functions.balance
        value, backward = jax.vjp(lambda x: weigh(x, microbatch), zeros_of(self._balance))
        (cotangent,) = backward(jnp.ones_like(value))
        return vary_over(cotangent, varying_axes(self._balance))

    def _layer_forward(
        self, weights: Any, x: jax.Array, number: jax.Array, context: Any
    ) -> tuple[tuple[jax.Array, jax.Array | None], Residuals]:
        again = (weights, number, context)
        return forward(
            lambda weights, x: self._functions.layer(weights, x, number, context),
            weights,
            x,
            again=again,
        )

    def _of_chunk(self, chunk: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Of one of this stage's chunks the number of layers, the first one's number, its row."""
        chunk = jnp.maximum(chunk, 0)
        count = jnp.int32(self._rows_per_chunk) if self._even else self._counts[chunk]
        return count, self._firsts[chunk], chunk * self._rows_per_chunk

    def _microbatch(self, number: jax.Array) -> Microbatch:
        return layer_slice(self._microbatches, jnp.maximum(number, 0))

    def _maybe(self, valid: jax.Array, do: Any, state: _State) -> tuple[_State, jax.Array]:
        """`do` if there is something to do, or in any case."""

        def typed(state: _State) -> tuple[_State, jax.Array]:
            after_it, made = do(state)
            return jax.tree.map(typed_like, after_it, state), self._typed(made)

        def skip(state: _State) -> tuple[_State, jax.Array]:
            return state, zeros_of(self._stream)

        return typed(state) if self._program.branch_free else lax.cond(valid, typed, skip, state)

    @property
    def _hands_over(self) -> bool:
        """Whether a stage holds two chunks that follow one another."""
        stage_of = self._placement.stage_of
        return any(a == b for a, b in itertools.pairwise(stage_of))

    def _typed(self, x: jax.Array) -> jax.Array:
        return typed_like(x, self._stream)


def _add(sums: Tree, gradient: Any) -> Tree:
    def add(total: jax.Array, leaf: jax.Array) -> jax.Array:
        return typed_like(total + leaf.astype(total.dtype), total)

    return jax.tree.map(add, sums, gradient)


def _add_row(sums: Tree, row: jax.Array, gradient: Any) -> Tree:
    stacked = jax.tree.map(lambda leaf: leaf[None], gradient)
    added: Tree = add_at(sums, row, stacked)
    return jax.tree.map(typed_like, added, sums)
