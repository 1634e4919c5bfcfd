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
from geojax.models.chunk.layer_scan import layer_slice
from geojax.models.parallel.varying import vary_over, varying_axes, zeros_of
from geojax.pipeline.execution.ring_buffers import behind, get, nan_of, put, typed_like
from geojax.pipeline.execution.stage_functions import (
    Microbatch,
    PipelineGradients,
    StageFunctions,
    StageWeights,
)
from geojax.pipeline.execution.stage_layers import StageLayers
from geojax.pipeline.execution.tick_program import NOTHING, Segment, TickProgram
from geojax.pipeline.schedule import Kind
from geojax.precision import split_quantized

Tree = TypeVar("Tree")

Cells = dict[str, jax.Array]
"""One tick's row of a stage's column of the table: int32 scalars."""


class _State(NamedTuple):
    """What passes from tick to tick on a stage."""

    inputs: jax.Array
    """[slots, *stream]: see `geojax.pipeline.execution.tick_program`."""
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
    layers_per_chunk: tuple[int, ...] | None = None
    """In the model's order; None: all chunks have as many as the stages hold of each."""
    sum_dtype: Any = jnp.float32
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
        schedule = self._program.ticks.schedule
        self._hands_over = any(a == b for a, b in itertools.pairwise(schedule.placement.stage_of))
        self._layers = StageLayers(
            executor.functions,
            weights,
            self._microbatch(self._stage * 0),
            self._stage,
            executor.axes,
            schedule.placement,
            executor.layers_per_chunk or self._as_held(),
            split=schedule.split_backward,
        )
        self._stream = self._layers.stream

    def gradients(self) -> PipelineGradients:
        rows = self._own_rows()
        state = self._start()
        for segment in self._program.segments:
            own = rows[segment.first : segment.first + segment.count]
            state, _ = lax.scan(functools.partial(self._tick, segment), state, own)
        balance, sums = after((state.balance, state.sums), state.loss)
        return PipelineGradients(state.loss, balance, sums)

    def _as_held(self) -> tuple[int, ...]:
        placement = self._program.ticks.schedule.placement
        held = len(jax.tree.leaves(self._weights.layers)[0])
        assert held % placement.chunks_per_stage == 0, "as many layers in each chunk of a stage"
        return (held // placement.chunks_per_stage,) * placement.chunks

    def _own_rows(self) -> jax.Array:
        """This stage's part of the table: int32 [ticks, columns]."""
        table = np.stack(list(self._program.columns.values()), axis=2)
        return lax.dynamic_index_in_dim(jnp.asarray(table), self._stage, 1, keepdims=False)

    def _cells(self, row: jax.Array) -> Cells:
        return {name: row[number] for number, name in enumerate(self._program.columns)}

    def loss(self) -> jax.Array:
        channels = self._program.channels
        numbers = [n for n, channel in enumerate(channels) if channel.kind is Kind.FORWARD]
        microbatch = jax.eval_shape(self._microbatch, self._stage)
        loss = jax.eval_shape(self._functions.head, self._weights.last, self._stream, microbatch)
        start = (
            nan_of(self._stream, max(self._program.slots["inputs"], 1)),
            nan_of(self._stream),
            vary_over(zeros_of(loss), frozenset(self._axes)),
        )

        def tick(state: tuple[jax.Array, jax.Array, jax.Array], row: jax.Array) -> Any:
            cells = self._cells(row)
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

        (_, _, loss), _ = lax.scan(tick, start, self._own_rows())
        return loss

    def _forward_only(
        self, inputs: jax.Array, loss: jax.Array, cells: Cells, before: list[jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A chunk forwards, and the head behind the last one: inputs, the stream, and the loss."""
        microbatch, context, cells = self._begin(Kind.FORWARD, cells, before)
        x = self._first_stream(inputs, cells, microbatch)
        x = self._layers.forward_only(x, cells["F.chunk"], context)
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

    def _first_stream(self, inputs: jax.Array, cells: Cells, microbatch: Microbatch) -> jax.Array:
        """What goes into a chunk: the embedding, or what has arrived."""
        return lax.cond(
            cells["F.first"] == 1,
            lambda: self._layers.typed(self._functions.embed(self._weights.first, microbatch)),
            lambda: get(inputs, cells["F.input"]),
        )

    def _start(self) -> _State:
        slots = self._program.slots
        microbatch = jax.eval_shape(self._microbatch, self._stage)
        loss = jax.eval_shape(self._functions.head, self._weights.last, self._stream, microbatch)
        balance = None
        if self._layers.balance is not None:
            assert self._functions.balance is not None, "layers have a balance: it is weighed"
            balance = jax.eval_shape(self._functions.balance, self._layers.balance, microbatch)
        rows = self._layers.rows_per_chunk
        delayed = {channel.kind.value for channel in self._program.channels if channel.delayed}
        axes = frozenset(self._axes)
        return _State(
            nan_of(self._stream, max(slots["inputs"], 1)),
            nan_of(self._stream, max(slots["cotangents"], 1)),
            [nan_of(leaf, slots["residuals"], rows) for leaf in self._layers.residuals.saved],
            [nan_of(leaf, slots["held"], rows) for leaf in self._layers.held],
            {kind: nan_of(self._stream) for kind in sorted(delayed)},
            vary_over(zeros_of(loss), axes),
            None if balance is None else vary_over(zeros_of(balance), axes),
            zeros_of(split_quantized(self._weights)[1], dtype=self._sum_dtype),
        )

    def _tick(self, segment: Segment, state: _State, row: jax.Array) -> tuple[_State, None]:
        cells, channels = self._cells(row), self._program.channels
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
        # What has travelled has done so under this tick's work, before anything else is sent.
        made, arrived = lax.optimization_barrier((made, arrived))
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
        microbatch, context, cells = self._begin(Kind.FORWARD, cells, before)

        def do(state: _State) -> tuple[_State, jax.Array]:
            x = self._first_stream(state.inputs, cells, microbatch)
            slot, chunk = jnp.maximum(cells["F.residuals"], 0), cells["F.chunk"]
            x, balance, residuals = self._layers.forward(x, state.residuals, slot, chunk, context)
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

    def _backward(
        self, state: _State, cells: Cells, before: list[jax.Array]
    ) -> tuple[_State, jax.Array]:
        """A chunk backwards, if the tick has one for this stage: the state, and its cotangent."""
        valid = cells["B.microbatch"] != NOTHING
        microbatch, context, cells = self._begin(Kind.BACKWARD, cells, before)

        def do(state: _State) -> tuple[_State, jax.Array]:
            arrived = get(state.cotangents, cells["B.input"])
            is_last = valid & (cells["B.last"] == 1)
            cotangent, loss, last = lax.cond(
                is_last, self._head, lambda x, loss, sums, _: (x, loss, sums),
                arrived, state.loss, state.sums.last, microbatch,
            )  # fmt: skip
            slot, chunk = jnp.maximum(cells["B.residuals"], 0), cells["B.chunk"]
            held, layers = state.held, state.sums.layers
            if self._program.ticks.schedule.split_backward:
                cotangent, held = self._layers.backward_of_input(
                    cotangent, state.residuals, slot, held, cells["B.held"], chunk, microbatch,
                    context,
                )  # fmt: skip
            else:
                only_if = valid if self._program.branch_free else None
                cotangent, layers = self._layers.backward(
                    cotangent, state.residuals, slot, chunk, microbatch, context, layers, only_if
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
        return self._layers.typed(cotangent), typed_like(loss + total, loss), _add(sums, gradient)

    def _embed_back(self, cotangent: jax.Array, sums: Any, microbatch: Microbatch) -> Any:
        stream, backward = jax.vjp(
            lambda first: self._functions.embed(first, microbatch), self._weights.first
        )
        missing = varying_axes(cotangent) - varying_axes(stream)
        assert not missing, f"a stream that varies over {missing} after the first layer, not before"
        (gradient,) = backward(cotangent)
        return _add(sums, gradient)

    def _weights_back(self, state: _State, cells: Cells, before: list[jax.Array]) -> _State:
        """The gradients of a chunk's weights, if the tick has them for this stage."""
        valid = cells["W.microbatch"] != NOTHING
        _, context, cells = self._begin(Kind.WEIGHT, cells, before)

        def do(state: _State) -> _State:
            sums = self._layers.backward_of_weights(
                state.residuals,
                cells["W.residuals"],
                state.held,
                cells["W.held"],
                cells["W.chunk"],
                context,
                state.sums.layers,
            )
            loss = after(state.loss, jax.tree.leaves(sums)[0])
            return state._replace(loss=loss, sums=state.sums._replace(layers=sums))

        return lax.cond(valid, do, lambda state: state, state)

    def _begin(
        self, kind: Kind, cells: Cells, before: list[jax.Array]
    ) -> tuple[Microbatch, Any, Cells]:
        """The microbatch of an action, its context, and the cells to read it by.

        What is read by these begins when all of `before` have been computed. The context is not
        made in a branch: XLA would fuse its sines and masks into all that reads them there.
        """
        cells = functools.reduce(after, before, cells)
        microbatch = self._microbatch(cells[f"{kind.value}.microbatch"])
        return microbatch, self._functions.context(microbatch), cells

    def _microbatch(self, number: jax.Array) -> Microbatch:
        return layer_slice(self._microbatches, jnp.maximum(number, 0))

    def _maybe(self, valid: jax.Array, do: Any, state: _State) -> tuple[_State, jax.Array]:
        """`do` if there is something to do, or in any case."""

        def typed(state: _State) -> tuple[_State, jax.Array]:
            after_it, made = do(state)
            return jax.tree.map(typed_like, after_it, state), self._layers.typed(made)

        def skip(state: _State) -> tuple[_State, jax.Array]:
            return state, zeros_of(self._stream)

        return typed(state) if self._program.branch_free else lax.cond(valid, typed, skip, state)


def _add(sums: Tree, gradient: Any) -> Tree:
    def add(total: jax.Array, leaf: jax.Array) -> jax.Array:
        return typed_like(total + leaf.astype(total.dtype), total)

    return jax.tree.map(add, sums, gradient)
