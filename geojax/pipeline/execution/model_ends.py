"""Embedding and head of a pipeline's model, in one trace of the program.

The first stage embeds and the last one has the head, each in a branch of its chunk's pass. What
stages share is an action of its own in a tick: its branch depends on the tick alone, so that all of
them take it and may send.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives import after
from geojax.collectives.axes import typed_like, varying_axes, zeros_of
from geojax.models.chunk.chunk import Microbatch, ModelFunctions
from geojax.models.chunk.layer_io import layer_slice
from geojax.pipeline.execution.ring_buffers import get, put
from geojax.pipeline.execution.shared_positions import SharedPositions
from geojax.pipeline.execution.shared_vocabulary import SharedVocabulary
from geojax.pipeline.execution.stage_weights import StageWeights
from geojax.pipeline.execution.tick_program import NOTHING, SCOPE_OF, TickProgram
from geojax.pipeline.schedule import Kind

Tree = TypeVar("Tree")

TickRow = dict[str, jax.Array]
"""One tick's entries for a stage, int32: scalars (see `TickProgram.columns`), and for each kind k
of action `k.rows` [layers of a chunk, columns] (see `RingRows`)."""


@dataclasses.dataclass(frozen=True, eq=False)
class ModelEnds:
    """Embedding and head on one stage; microbatches are named by number."""

    functions: ModelFunctions
    program: TickProgram
    shared: SharedPositions | SharedVocabulary | None
    """Parts of them that stages share; None: none."""
    weights: StageWeights
    """The weights of this stage, those of its layers too."""
    microbatches: Microbatch
    stream: Any
    """The type of the stream between layers."""

    def __post_init__(self) -> None:
        assert self.program.shares_head == self.shares_head, "the program must share the same head"
        assert self.program.shares_embedding == self.shares_embedding, (
            "the program must share the same embedding"
        )

    @property
    def shares_head(self) -> bool:
        """True if stages share the head of a microbatch."""
        return self.shared is not None

    @property
    def shares_embedding(self) -> bool:
        """True if stages share the embedding of a microbatch."""
        return isinstance(self.shared, SharedVocabulary)

    def microbatch(self, number: jax.Array) -> Microbatch:
        """Return a microbatch; any, if the number is `NOTHING`."""
        return layer_slice(self.microbatches, jnp.maximum(number, 0))

    def first_stream(
        self, inputs: jax.Array, tick_row: TickRow, microbatch: Microbatch
    ) -> jax.Array:
        """Return the stream before a chunk: embedded, or arrived."""
        if self.shares_embedding:  # it is where a stream arrives
            return get(inputs, tick_row["F.input"])
        return lax.cond(
            tick_row["F.first"] == 1,
            lambda: self._typed(self._embedded(microbatch)),
            lambda: get(inputs, tick_row["F.input"]),
        )

    def loss(
        self, x: jax.Array, loss: jax.Array, tick_row: TickRow, microbatch: Microbatch
    ) -> jax.Array:
        """Add the losses of a microbatch whose last forward the tick has."""
        head, runs_head = self.functions.head, tick_row["F.last"] == 1
        if self.shared is not None:
            head, number = self.shared.loss, tick_row["head.of_forward"]
            microbatch, runs_head = self.microbatch(after(number, x)), number != NOTHING
        return lax.cond(
            runs_head,
            lambda x, loss: typed_like(loss + head(self.weights.last, x, microbatch), loss),
            lambda x, loss: loss,
            x,
            loss,
        )

    def head(
        self, x: jax.Array, loss: jax.Array, sums: Any, microbatch: Microbatch
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Run the head forwards and backwards: the cotangent of its input `x`, and all sums."""
        head = self.functions if self.shared is None else self.shared
        made = head.head_gradients(self.weights.last, x, microbatch)
        loss = typed_like(loss + made.loss, loss)
        return self._typed(made.x), loss, _add(sums, made.weights)

    def shared_head(
        self,
        tick_row: TickRow,
        before: list[jax.Array],
        cotangents: jax.Array,
        loss: jax.Array,
        sums: Any,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Run the head that stages share, in a tick that has one; all of them take the branch.

        It reads the stream where the last stage's backward will, and leaves the cotangent there.
        """
        tick_row = functools.reduce(after, before, tick_row)
        microbatch = self.microbatch(tick_row["head.microbatch"])

        def do(
            cotangents: jax.Array, loss: jax.Array, sums: Any
        ) -> tuple[jax.Array, jax.Array, Any]:
            slot = tick_row["head.slot"]
            x, loss, sums = self.head(get(cotangents, slot), loss, sums, microbatch)
            loss = functools.reduce(after, [x, *jax.tree.leaves(sums)], loss)
            return put(cotangents, x, slot), loss, sums

        if self.program.branch_free:
            return do(cotangents, loss, sums)
        return lax.cond(
            tick_row["head.microbatch"] != NOTHING,
            do,
            lambda *unchanged: unchanged,
            cotangents,
            loss,
            sums,
        )

    @jax.named_scope(SCOPE_OF[Kind.FORWARD])
    def embed_forwards(
        self, tick_row: TickRow, before: list[jax.Array], inputs: jax.Array, loss: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Embed with the vocabulary that stages share, in a tick whose forward needs it."""
        number = functools.reduce(after, before, tick_row["embedding.F"])
        microbatch, shared = self.microbatch(number), self._vocabulary
        x = lax.cond(
            number != NOTHING,
            lambda: self._typed(shared.embedded(self.weights.first, microbatch)),
            lambda: zeros_of(self.stream),
        )
        return put(inputs, x, tick_row["embedding.slot"]), after(loss, x)

    @jax.named_scope(SCOPE_OF[Kind.BACKWARD])
    def embed_backwards(
        self,
        tick_row: TickRow,
        before: list[jax.Array],
        cotangent: jax.Array,
        loss: jax.Array,
        sums: Any,
    ) -> tuple[jax.Array, Any]:
        """Add the gradients of the vocabulary that stages share, behind a tick that ended one."""
        number = functools.reduce(after, before, tick_row["embedding.B"])
        sums = lax.cond(
            number != NOTHING,
            self._shared_embed_gradients,
            lambda cotangent, sums, number: sums,
            cotangent,
            sums,
            number,
        )
        return functools.reduce(after, jax.tree.leaves(sums), loss), sums

    @jax.named_scope(SCOPE_OF[Kind.BACKWARD])
    def embed_last(self, cotangent: jax.Array, loss: jax.Array, sums: Any) -> Any:
        """Add the gradients of the vocabulary that stages share, if the last tick ended one."""
        columns, stage = self.program.columns, self.program.ticks.schedule.placement.stage_of[0]
        if columns["B.first"][-1, stage] != 1:
            return sums
        last = jnp.int32(columns["B.microbatch"][-1, stage])
        return self._shared_embed_gradients(*after((cotangent, sums, last), loss))

    @jax.named_scope("embedding")
    def embed_gradients(self, cotangent: jax.Array, sums: Any, microbatch: Microbatch) -> Any:
        """Add the gradients of the embedding's weights to their sums."""
        functions, first = self.functions, self.weights.first
        if functions.embed_sums is not None:
            added = functions.embed_sums(first, microbatch, cotangent, sums)
            return jax.tree.map(typed_like, added, sums)
        stream, residuals = functions.embed_forward(first, microbatch)
        missing = varying_axes(cotangent) - varying_axes(stream)
        assert not missing, f"a stream that varies over {missing} after the first layer, not before"
        return _add(sums, functions.embed_gradients(first, residuals, cotangent, microbatch))

    @jax.named_scope("embedding")
    def _embedded(self, microbatch: Microbatch) -> jax.Array:
        return self.functions.embed(self.weights.first, microbatch)

    def _shared_embed_gradients(self, cotangent: jax.Array, sums: Any, number: jax.Array) -> Any:
        of_all = self._typed(self._vocabulary.of_first_stage(cotangent))
        return self.embed_gradients(of_all, sums, self.microbatch(number))

    @property
    def _vocabulary(self) -> SharedVocabulary:
        assert isinstance(self.shared, SharedVocabulary), "stages must share the vocabulary"
        return self.shared

    def _typed(self, x: jax.Array) -> jax.Array:
        return typed_like(x, self.stream)


def _add(sums: Tree, gradient: Any) -> Tree:
    def add(total: jax.Array, leaf: jax.Array) -> jax.Array:
        return typed_like(total + leaf.astype(total.dtype), total)

    return jax.tree.map(add, sums, gradient)
