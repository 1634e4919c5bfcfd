"""One SPMD program that runs a table of ticks: a loop whose body has a forward and a backward.

    tick t    send what tick t-1 made (delayed channels)
              forward of a chunk: stream and residuals of a microbatch
              backward of a chunk: its cotangent and, summed, the gradients of its weights
              send what this tick made (the other channels)

A delayed message and the work of its tick do not wait for each other. Residuals lie in ring
buffers that are updated in place. Every stage runs the same program on its own column of the table;
a stage without work either takes a branch that does nothing, or (`branch_free`) computes on values
that are never used. With `joint` a forward and a backward of one stage that do not read what the
other makes are one branch, in which each computes while the other's messages travel; where no stage
is idle there is none. Buffers begin as NaN, so that a value that leaks from a bubble shows.

Where the weights of chunks come late, the first ticks are a loop of loops, a chunk to each. Where
parts of the gradients are to leave early, the loop ends when one is whole on all stages.
Others run the ticks until the next one is, while it is summed in the site, then between sites.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.collectives import after, barrier
from geojax.collectives.axes import typed_like, vary_over, zero_after, zeros_of
from geojax.collectives.order import held_until
from geojax.models.chunk.chunk import Microbatch, ModelFunctions
from geojax.models.chunk.layer_io import layer_slice
from geojax.models.declaration import Parameters
from geojax.models.frozen import trained_part
from geojax.pipeline.execution.early_parts import EarlyParts, EarlyReduction
from geojax.pipeline.execution.late_chunks import LateChunks
from geojax.pipeline.execution.late_products import with_late_products
from geojax.pipeline.execution.model_ends import ModelEnds, TickRow
from geojax.pipeline.execution.ready_parts import Part
from geojax.pipeline.execution.ring_buffers import get, nan_of, put
from geojax.pipeline.execution.ring_pool import RingRows
from geojax.pipeline.execution.shared_positions import SharedPositions
from geojax.pipeline.execution.shared_vocabulary import SharedVocabulary
from geojax.pipeline.execution.stage_chunks import ChunkVisit, HeldChunk, Rings, StageChunks
from geojax.pipeline.execution.stage_weights import PipelineGradients, StageWeights
from geojax.pipeline.execution.summed_products import with_summed_products
from geojax.pipeline.execution.tick_program import (
    FULL_TICKS,
    NOTHING,
    SCOPE_OF,
    TickForm,
    TickProgram,
)
from geojax.pipeline.schedule import Kind


class _State(NamedTuple):
    """The state of a stage between two ticks."""

    inputs: jax.Array
    """[slots, *stream]; see `geojax.pipeline.execution.tick_program`."""
    cotangents: jax.Array
    """[slots, *stream]."""
    rings: Rings
    """Residuals and stashes; see `geojax.pipeline.execution.ring_pool`."""
    made: dict[str, jax.Array]
    """The results of the last tick by kind of action, for the delayed channels and for an embedding
    that stages share."""
    loss: jax.Array
    balance: jax.Array | None
    sums: StageWeights
    """The gradients so far."""
    held: dict[str, HeldChunk]
    """The chunks of the next forward and backward, by kind; empty: ticks read the stack."""


_Pass = Callable[[_State], tuple[_State, jax.Array]]
"""Function from the state before an action to that after it, and to what it made: a stream, or a
cotangent."""

_Passes = Callable[
    [TickForm, _State, TickRow, list[jax.Array]], tuple[_State, dict[str, jax.Array]]
]
"""Function from a tick's form, state, row and arrivals to the state behind its actions, and to what
these made, by kind."""


@dataclasses.dataclass(frozen=True, eq=False)
class Executor:
    """A pipeline of one model, to be run inside a step's `shard_map`."""

    program: TickProgram
    functions: ModelFunctions
    axes: tuple[str, ...]
    """The mesh axes that number the stages."""
    layers_per_chunk: tuple[int, ...] | None = None
    """In the model's order; None: all chunks have as many as the stages hold of each."""
    sum_dtype: Any = jnp.float32
    """The dtype of the gradients' sums."""
    shared_ends: SharedPositions | SharedVocabulary | None = None
    """Parts of embedding and head that stages share, and the program then too; None: the first one
    embeds, and the last one has the head."""
    adds_in_products: bool = True
    """True if products of layers add to the sums of the chunk that a stage runs a copy of."""

    def gradients(
        self,
        weights: StageWeights,
        microbatches: Microbatch,
        early: EarlyReduction | None = None,
        late: LateChunks | None = None,
    ) -> PipelineGradients:
        """Compute loss and gradients of all microbatches.

        Args:
            weights: this rank's, typed as varying over the stage axes and over all axes along which
                ranks see other sequences.
            microbatches: of this rank, each leaf [M, B, ...].
            early: reduces parts of the gradients as soon as they are whole; None: nothing does.
            late: gathers the chunks of a stage but the first one, which `weights` then lack; None:
                they have all. The program must have branches.
        """
        return _Run(self, weights, microbatches).gradients(early, late)

    def loss(self, weights: StageWeights, microbatches: Microbatch) -> jax.Array:
        """Sum the losses of all microbatches on the last stage, forwards only; elsewhere 0.

        Arguments are those of `gradients`.
        """
        return _Run(self, weights, microbatches).loss()


class _Run:
    """One trace of the program."""

    def __init__(self, executor: Executor, weights: StageWeights, microbatches: Microbatch):
        self._functions, self._program = executor.functions, executor.program
        self._axes, self._sum_dtype = executor.axes, executor.sum_dtype
        self._adds_in_products = executor.adds_in_products
        weights, self._zero = zero_after(weights)
        self._weights = weights
        self._stage = lax.axis_index(self._axes)
        schedule = self._program.ticks.schedule
        self._placement = schedule.placement
        # Two consecutive chunks on one stage: no message, the stream goes to a slot.
        hops = itertools.pairwise(self._placement.stage_of)
        self._has_local_hops = any(sender == receiver for sender, receiver in hops)
        layers_per_chunk = executor.layers_per_chunk or self._equal_chunks()
        self._layers = StageChunks(
            executor.functions,
            weights,
            layer_slice(microbatches, self._stage * 0),
            self._stage,
            executor.axes,
            self._placement,
            layers_per_chunk,
            split=schedule.split_backward,
        )
        self._layers_per_chunk = layers_per_chunk
        self._stream = self._layers.stream
        self._ends = ModelEnds(
            executor.functions,
            self._program,
            executor.shared_ends,
            weights,
            microbatches,
            self._stream,
        )

    @functools.cached_property
    def _rows(self) -> RingRows:
        return RingRows.of(self._program, self._layers.pool, self._layers_per_chunk)

    def gradients(self, early: EarlyReduction | None, late: LateChunks | None) -> PipelineGradients:
        ticks, state, end = self._stage_ticks(), self._start(), self._program.ticks.ticks
        run, done = self, 0
        if late is not None:
            run, state, done = self._beside_gathers(late, ticks, state)
        exchanged: Mapping[Part, Any] = {}
        if early is None:
            state = run._run_ticks(ticks, state, done, end)
        else:
            parts = EarlyParts(early, end)
            for tick in parts.boundaries:
                state = run._run_ticks(ticks, state, done, tick)
                state, token = parts.at(tick, state, state.sums, state.loss)
                state, done = state._replace(loss=token), tick
            state = run._run_ticks(ticks, state, done, end)
            exchanged, state = parts.finish(state)
        if self._ends.shares_embedding:
            first = self._ends.embed_last(state.made["B"], state.loss, state.sums.first)
            state = state._replace(sums=state.sums._replace(first=first))
        if _held_sums(state):
            layers = state.held["B"].put_back(state.sums.layers)
            state = state._replace(sums=state.sums._replace(layers=layers))
        balance, sums = after((state.balance, state.sums), state.loss)
        return PipelineGradients(state.loss, balance, sums, exchanged)

    def _beside_gathers(
        self, late: LateChunks, ticks: jax.Array, state: _State
    ) -> tuple["_Run", _State, int]:
        """Run the ticks beside which chunks come.

        Returns:
            The run of the other ticks, with all weights; the state before them, and the first.
        """
        whole = self._program.segments[0]
        others = self._placement.chunks_per_stage - 1
        done = others * late.window
        assert done <= whole.end, "the last chunk comes before the first backward"
        rows = ticks[:done].reshape(others, late.window, len(whole.pattern), -1)

        def window(
            carry: tuple[_State, Parameters], rows_and_chunk: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[_State, Parameters], None]:
            (state, layers), (rows, chunk) = carry, rows_and_chunk
            taken, state = barrier((late.take(chunk), state))
            gathered = late.gather(taken)
            # On CPUs the ticks wait for the chunk: all devices have one order.
            loss = functools.reduce(after, jax.tree.leaves(gathered), state.loss)
            state, _ = lax.scan(
                functools.partial(self._with(layers)._pattern, whole.pattern),
                state._replace(loss=loss),
                rows,
            )
            layers = late.put(layers, chunk, held_until(gathered, state.loss))
            held = {kind: each.renewed_if(chunk, layers) for kind, each in state.held.items()}
            return (state._replace(held=held), layers), None

        chunks = jnp.arange(1, others + 1)
        (state, layers), _ = lax.scan(window, (state, self._weights.layers), (rows, chunks))
        return self._with(layers), state, done

    def _with(self, layers: Parameters) -> "_Run":
        """Return the same run with other weights of the layers."""
        run = copy.copy(self)
        run._weights = self._weights._replace(layers=layers)
        run._layers = self._layers.with_weights(layers)
        return run

    def _run_ticks(self, ticks: jax.Array, state: _State, first: int, end: int) -> _State:
        """Run the ticks from `first` to before `end`."""
        for whole in self._program.segments:
            for segment in whole.part(max(first, whole.first), min(end, whole.end)):
                rows = ticks[segment.first : segment.end]
                rows = rows.reshape(segment.repeats, len(segment.pattern), -1)
                state, _ = lax.scan(functools.partial(self._pattern, segment.pattern), state, rows)
        return state

    def _equal_chunks(self) -> tuple[int, ...]:
        placement = self._placement
        layers = len(jax.tree.leaves(self._weights.layers)[0])
        assert layers % placement.chunks_per_stage == 0, "a stage's chunks must be equally long"
        return (layers // placement.chunks_per_stage,) * placement.chunks

    def _stage_ticks(self) -> jax.Array:
        """Return this stage's part of the table: int32 [ticks, columns], rows flattened."""
        table = np.stack(list(self._program.columns.values()), axis=2)
        rows = [np.maximum(rows, 0) for rows in self._rows.of_kind.values()]
        table = np.concatenate([table, *(each.reshape(*each.shape[:2], -1) for each in rows)], 2)
        return lax.dynamic_index_in_dim(jnp.asarray(table), self._stage, 1, keepdims=False)

    def _tick_row(self, row: jax.Array) -> TickRow:
        tick_row = {name: row[number] for number, name in enumerate(self._program.columns)}
        first = len(tick_row)
        for kind, rows in self._rows.of_kind.items():
            shape = rows.shape[2:]
            tick_row[f"{kind.value}.rows"] = row[first : first + math.prod(shape)].reshape(shape)
            first += math.prod(shape)
        return tick_row

    def loss(self) -> jax.Array:
        channels = enumerate(self._program.channels)
        numbers = tuple(n for n, channel in channels if channel.kind is Kind.FORWARD)
        kinds = (Kind.FORWARD,)
        embeds = kinds if self._ends.shares_embedding else ()
        form = TickForm(kinds, numbers, head=False, embeds=embeds)
        state = self._start()
        state = state._replace(rings=[], balance=None, sums=StageWeights({}, {}, {}), held={})

        def tick(state: _State, row: jax.Array) -> tuple[_State, None]:
            return self._tick(form, state, row, self._forward_only), None

        return lax.scan(tick, state, self._stage_ticks())[0].loss

    @jax.named_scope(SCOPE_OF[Kind.FORWARD])
    def _forward_only(
        self, form: TickForm, state: _State, tick_row: TickRow, arrived: list[jax.Array]
    ) -> tuple[_State, dict[str, jax.Array]]:
        """Run a chunk forwards and keep nothing, and after the last one the head."""
        visit, tick_row = self._begin(Kind.FORWARD, tick_row, [state.loss, *arrived])
        x = self._ends.first_stream(state.inputs, tick_row, visit.batch)
        x = self._layers.forward_only(x, visit)
        loss = self._ends.loss(x, state.loss, tick_row, visit.batch)
        inputs = self._for_next_chunk(state.inputs, x, tick_row)
        return state._replace(inputs=inputs, loss=loss), {"F": self._layers.typed(x)}

    def _for_next_chunk(self, inputs: jax.Array, x: jax.Array, tick_row: TickRow) -> jax.Array:
        """Keep the stream for the next chunk, if that is on the same stage."""
        if not self._has_local_hops:
            return inputs
        return put(inputs, x, jnp.where(tick_row["F.last"] == 1, NOTHING, tick_row["F.output"]))

    def _start(self) -> _State:
        slots = self._program.slots
        microbatch = jax.eval_shape(self._ends.microbatch, self._stage)
        loss = jax.eval_shape(self._functions.head, self._weights.last, self._stream, microbatch)
        balance = None
        if self._layers.balance is not None:
            assert self._functions.balance is not None, "balance losses must have a weight"
            balance = jax.eval_shape(self._functions.balance, self._layers.balance, microbatch)
        rings = zip(self._layers.pool.rings, self._rows.counts, strict=True)
        kept = {channel.kind.value for channel in self._program.channels if channel.delayed}
        if self._ends.shares_embedding:
            kept.add(Kind.BACKWARD.value)
        axes, zero = frozenset(self._axes), self._zero
        sums = zeros_of(trained_part(self._weights), dtype=self._sum_dtype, zero=zero)
        held: dict[str, HeldChunk] = {}
        if self._program.holds_chunks(self._layers_per_chunk):
            first, layers = vary_over(jnp.int32(0), axes), self._weights.layers
            held["F"] = HeldChunk.of(first, layers, {})
            held["B"] = HeldChunk.of(first, layers, sums.layers if self._adds_in_products else {})
        return _State(
            nan_of(self._stream, max(slots["inputs"], 1), zero=zero),
            nan_of(self._stream, max(slots["cotangents"], 1), zero=zero),
            [nan_of(leaf, count, zero=zero) for leaf, count in rings],
            {kind: nan_of(self._stream, zero=zero) for kind in sorted(kept)},
            vary_over(zeros_of(loss), axes),
            None if balance is None else vary_over(zeros_of(balance), axes),
            sums,
            held,
        )

    def _pattern(
        self, pattern: tuple[TickForm, ...], state: _State, rows: jax.Array
    ) -> tuple[_State, None]:
        for form, row in zip(pattern, rows, strict=True):
            with jax.named_scope(FULL_TICKS) if form.full else contextlib.nullcontext():
                state = self._tick(form, state, row, self._passes)
        return state, None

    def _tick(self, form: TickForm, state: _State, row: jax.Array, passes: _Passes) -> _State:
        tick_row, channels = self._tick_row(row), self._program.channels
        arrived = {
            number: self._send(number, after(state.made[channels[number].kind.value], state.loss))
            for number in form.channels
            if channels[number].delayed
        }
        if Kind.BACKWARD in form.embeds:
            loss, first = self._ends.embed_backwards(
                tick_row,
                [state.loss, *arrived.values()],
                state.made["B"],
                state.loss,
                state.sums.first,
            )
            state = state._replace(loss=loss, sums=state.sums._replace(first=first))
        if Kind.FORWARD in form.embeds:
            inputs, loss = self._ends.embed_forwards(
                tick_row, [state.loss, *arrived.values()], state.inputs, state.loss
            )
            state = state._replace(inputs=inputs, loss=loss)
        state, made = passes(form, state, tick_row, list(arrived.values()))
        if Kind.WEIGHT in form.kinds:
            state = self._weight_gradients(
                state, tick_row, [state.loss, *arrived.values(), *made.values()]
            )
        # Delayed messages travel while this tick computes, before anything else is sent.
        made, arrived = lax.optimization_barrier((made, arrived))
        # The loss waits for gradients of weights: late products, or what has messages of its own.
        tokens = [*made.values(), state.loss]
        ordered = {kind: functools.reduce(after, tokens, each) for kind, each in made.items()}
        for number in form.channels:
            if not channels[number].delayed:
                arrived[number] = self._send(number, ordered[channels[number].kind.value])
        when_made = functools.partial(functools.reduce, held_until, tokens)
        inputs, cotangents = state.inputs, state.cotangents
        for number, stream in arrived.items():
            slot = when_made(tick_row[f"channel.{number}"])
            if channels[number].kind is Kind.FORWARD:
                inputs = put(inputs, stream, slot)
            else:
                cotangents = put(cotangents, stream, slot)
        kept = state.made | {kind: made[kind] for kind in state.made if kind in made}
        for kind in state.held:
            # Beside the messages: the stack is read when nothing reads the chunk any more.
            following = when_made(tick_row[f"{kind}.following"])
            state = self._with_chunk(state, kind, following)
        # The next tick waits for all of this one: XLA unrolls a loop of one iteration.
        loss = functools.reduce(after, [*made.values(), *arrived.values()], state.loss)
        return state._replace(inputs=inputs, cotangents=cotangents, made=kept, loss=loss)

    def _with_chunk(self, state: _State, kind: str, number: jax.Array) -> _State:
        """Hold chunk `number` for the actions of a kind."""
        held, sums = state.held[kind], state.sums
        turned, layers = held.turned_to(
            number, self._weights.layers, sums.layers if held.sums else {}
        )
        if held.sums:
            sums = sums._replace(layers=layers)
        return state._replace(held=state.held | {kind: turned}, sums=sums)

    def _send(self, number: int, stream: jax.Array) -> jax.Array:
        channel = self._program.channels[number]
        with jax.named_scope(f"hop {channel.kind.name.lower()}"):
            return lax.ppermute(stream, self._axes, channel.pairs)

    def _passes(
        self, form: TickForm, state: _State, tick_row: TickRow, arrived: list[jax.Array]
    ) -> tuple[_State, dict[str, jax.Array]]:
        """Run the forward and the backward that a tick has for this stage, and what they made."""
        read: _State | None = None
        if self._rows.behind:
            read, state = state, state._replace(rings=self._layers.unkept, held={})
            if held_sums := _held_sums(read):
                state = state._replace(sums=state.sums._replace(layers=held_sums))
        turns_later = self._program.ticks.turns_later
        if form.head and turns_later:
            state = self._run_shared_head(tick_row, [state.loss, *arrived], state)

        def one_by_one(state: _State) -> tuple[_State, dict[str, jax.Array]]:
            made: dict[str, jax.Array] = {}
            if Kind.FORWARD in form.kinds:
                valid, do = self._forward(tick_row, read, [state.loss, *arrived])
                state, made["F"] = self._maybe(form, valid, do, state)
            if form.head and not turns_later:
                state = self._run_shared_head(
                    tick_row, [state.loss, *arrived, *made.values()], state
                )
            if Kind.BACKWARD in form.kinds:
                before = [state.loss, *arrived, *made.values()]
                valid, do = self._backward(tick_row, read, before)
                if read is not None and _held_sums(read):
                    do = functools.partial(with_summed_products, do)
                state, made["B"] = self._maybe(form, valid, do, state)
            return state, made

        def jointly(state: _State) -> tuple[_State, dict[str, jax.Array]]:
            tokens = [state.loss, *arrived]
            before, (state, cotangent) = state, self._backward(tick_row, read, tokens)[1](state)
            # The forward's results are written when the backward has read its own; until then it
            # waits for nothing of the backward.
            state, cotangent = barrier((state, cotangent))
            state = state._replace(inputs=before.inputs, balance=before.balance)
            state, stream = self._forward(tick_row, read, [*tokens, cotangent])[1](state)
            state = jax.tree.map(typed_like, state, before)
            return state, {"F": self._layers.typed(stream), "B": self._layers.typed(cotangent)}

        both = {Kind.FORWARD, Kind.BACKWARD} <= set(form.kinds)
        if not (self._program.joint and both):
            state, made = one_by_one(state)
        elif form.full:
            state, made, late = with_late_products(jointly, state)
            state = state._replace(loss=functools.reduce(held_until, late, state.loss))
        else:
            state, made = lax.cond(
                tick_row["joint"] == 1,
                functools.partial(with_summed_products, jointly),
                one_by_one,
                state,
            )
        if read is None:
            return state, made
        rings = read.rings
        if Kind.FORWARD in form.kinds:
            rings = self._layers.keep(rings, tick_row["F.rows"], state.rings)
        state = state._replace(rings=rings, held=read.held)
        if _held_sums(read):
            backward = read.held["B"]._replace(sums=state.sums.layers)
            sums = state.sums._replace(layers=read.sums.layers)
            state = state._replace(held=state.held | {"B": backward}, sums=sums)
        return state, made

    def _forward(
        self, tick_row: TickRow, read: _State | None, before: list[jax.Array]
    ) -> tuple[jax.Array, _Pass]:
        """Return whether the tick has a forward for this stage, and what runs it."""
        valid = tick_row["F.microbatch"] != NOTHING
        visit, tick_row = self._begin(Kind.FORWARD, tick_row, before, read)

        @jax.named_scope(SCOPE_OF[Kind.FORWARD])
        def do(state: _State) -> tuple[_State, jax.Array]:
            x = self._ends.first_stream(state.inputs, tick_row, visit.batch)
            # Layers gather the documents' numbers, which do not need the stream.
            batch, context = after((visit.batch, visit.context), x)
            rows = self._layers.unkept_rows if self._rows.behind else visit.rows
            own = visit._replace(rows=rows, batch=batch, context=context)
            x, balance, rings = self._layers.forward(x, state.rings, own)
            total = state.balance
            if balance is not None and total is not None:
                total = typed_like(total + jnp.where(valid, balance, 0), total)
            state = state._replace(rings=rings, balance=total)
            cotangents = put(
                state.cotangents,
                x,
                jnp.where(tick_row["F.last"] == 1, tick_row["F.output"], NOTHING),
            )
            inputs = self._for_next_chunk(state.inputs, x, tick_row)
            return state._replace(inputs=inputs, cotangents=cotangents), x

        return valid, do

    def _backward(
        self, tick_row: TickRow, read: _State | None, before: list[jax.Array]
    ) -> tuple[jax.Array, _Pass]:
        """Return whether the tick has a backward for this stage, and what runs it."""
        valid = tick_row["B.microbatch"] != NOTHING
        visit, tick_row = self._begin(Kind.BACKWARD, tick_row, before, read)

        @jax.named_scope(SCOPE_OF[Kind.BACKWARD])
        def do(state: _State) -> tuple[_State, jax.Array]:
            arrived = get(state.cotangents, tick_row["B.input"])
            is_last = valid & (tick_row["B.last"] == 1)
            cotangent, loss, last = arrived, state.loss, state.sums.last
            if not self._ends.shares_head:
                cotangent, loss, last = lax.cond(
                    is_last, self._ends.head, lambda x, loss, sums, _: (x, loss, sums),
                    arrived, loss, last, visit.batch,
                )  # fmt: skip
            rings, layers = state.rings if read is None else read.rings, state.sums.layers
            if self._program.ticks.schedule.split_backward:
                cotangent, rings = self._layers.input_gradient(cotangent, rings, visit)
                state = state._replace(rings=rings)
            else:
                only_if = valid if self._program.branch_free else None
                cotangent, layers = self._layers.backward(cotangent, rings, visit, layers, only_if)
            first = state.sums.first
            if not self._ends.shares_embedding:
                is_first = valid & (tick_row["B.first"] == 1)
                first = lax.cond(
                    is_first, self._ends.embed_gradients, lambda x, sums, _: sums,
                    cotangent, first, visit.batch,
                )  # fmt: skip
                # Nothing reads these sums soon, and what waits for the tick must wait for them too.
                cotangent = functools.reduce(after, jax.tree.leaves(first), cotangent)
            cotangents = state.cotangents
            if self._has_local_hops:
                cotangents = put(cotangents, cotangent, tick_row["B.output"])
            sums = StageWeights(first, layers, last)
            state = state._replace(cotangents=cotangents, loss=loss, sums=sums)
            return state, cotangent

        return valid, do

    def _run_shared_head(self, tick_row: TickRow, before: list[jax.Array], state: _State) -> _State:
        cotangents, loss, last = self._ends.shared_head(
            tick_row, before, state.cotangents, state.loss, state.sums.last
        )
        sums = state.sums._replace(last=last)
        return state._replace(cotangents=cotangents, loss=loss, sums=sums)

    @jax.named_scope(SCOPE_OF[Kind.WEIGHT])
    def _weight_gradients(
        self, state: _State, tick_row: TickRow, before: list[jax.Array]
    ) -> _State:
        """Add the gradients of a chunk's weights, if the tick has them for this stage."""
        valid = tick_row["W.microbatch"] != NOTHING
        visit, _ = self._begin(Kind.WEIGHT, tick_row, before)

        def do(state: _State) -> _State:
            sums = self._layers.weight_gradients(state.rings, visit, state.sums.layers)
            loss = after(state.loss, jax.tree.leaves(sums)[0])
            return state._replace(loss=loss, sums=state.sums._replace(layers=sums))

        return lax.cond(valid, do, lambda state: state, state)

    def _begin(
        self, kind: Kind, tick_row: TickRow, before: list[jax.Array], read: _State | None = None
    ) -> tuple[ChunkVisit, TickRow]:
        """Return an action's visit to its chunk, and the tick's row.

        Reads by this row begin when all of `before` have been computed. The context is not made in
        a branch: XLA would fuse its sines and masks into all that reads them there.
        """
        tick_row = functools.reduce(after, before, tick_row)
        microbatch = self._ends.microbatch(tick_row[f"{kind.value}.microbatch"])
        context = self._functions.context(microbatch)
        chunk, rows = tick_row[f"{kind.value}.chunk"], tick_row[f"{kind.value}.rows"]
        held = None if read is None else read.held.get(kind.value)
        return ChunkVisit(chunk, rows, microbatch, context, held), tick_row

    def _maybe(
        self, form: TickForm, valid: jax.Array, do: _Pass, state: _State
    ) -> tuple[_State, jax.Array]:
        """Run `do` if there is something to do; without branches, in any case."""

        def typed(state: _State) -> tuple[_State, jax.Array]:
            next_state, made = do(state)
            return jax.tree.map(typed_like, next_state, state), self._layers.typed(made)

        def skip(state: _State) -> tuple[_State, jax.Array]:
            return state, zeros_of(self._stream)

        if self._program.branch_free or form.full:
            return typed(state)
        return lax.cond(valid, typed, skip, state)


def _held_sums(state: _State) -> Parameters:
    """Return the sums of the gradients of the chunk that goes backwards; empty: it has none."""
    return state.held["B"].sums if state.held else {}
