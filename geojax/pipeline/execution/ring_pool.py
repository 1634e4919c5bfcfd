"""The pool of ring buffers in which a stage holds what its layers leave between their passes.

A layer's residuals wait from its forward to its backward or, where that is split and the gradients
of the weights read them, to these; the stash of a split backward waits between its halves:

    residual that only the backward reads       F ─────────► B
    residual that the weights' gradients read   F ─────────► B ─────► W
    stash                                                    B ─────► W

Where backwards are split, all values of one size and type share a ring [rows, *value]: a row that a
residual leaves is the next stash's. Where they are not, all values of a layer come and go together:
each has a ring of its own, and they lie in the same row of each. A chunk takes as many rows as it
has layers. They are assigned by coloring the intervals, which takes the fewest possible on a stage;
every stage has as many as the one that needs most.

Rings that are written behind the branches (`RingRows.behind`) take the rows that a backward of the
tick leaves. They are written in every tick in which any stage has a forward, by all stages.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from geojax.collectives.axes import varying_axes
from geojax.pipeline.execution.tick_program import NOTHING, TickProgram
from geojax.pipeline.schedule import KIND_RANK, Kind


class RingLeaf(NamedTuple):
    """One value of a layer: the ring that it lies in, and for how long."""

    ring: int
    column: int
    """Values of one column lie in the same rows of different rings."""
    first: Kind
    """The kind of action that writes it."""
    last: Kind
    """The kind of action that is the last to read it."""


@dataclasses.dataclass(frozen=True)
class RingPool:
    """The rings of a stage, and the ring of each value of a layer."""

    rings: tuple[Any, ...]
    """The type of the rows of each ring."""
    leaves: tuple[RingLeaf, ...]
    """The values of a layer: its residuals, and behind them its stash."""

    @classmethod
    def of(
        cls, residuals: Sequence[Any], stash: Sequence[Any] | None, read_later: frozenset[int]
    ) -> "RingPool":
        """Make the pool for the types of a layer's residuals and stash.

        Args:
            residuals: the types of a layer's residuals.
            stash: the types of its stash; None where the backward is not split.
            read_later: the residuals, by position, that the gradients of the weights read.
        """
        if stash is None:
            lifetime = (Kind.FORWARD, Kind.BACKWARD)
            alone = tuple(RingLeaf(ring, 0, *lifetime) for ring in range(len(residuals)))
            return cls(tuple(residuals), alone)
        rings: dict[Any, Any] = {}
        leaves = []
        lifetimes = [
            (Kind.FORWARD, Kind.WEIGHT if position in read_later else Kind.BACKWARD)
            for position in range(len(residuals))
        ]
        lifetimes += [(Kind.BACKWARD, Kind.WEIGHT)] * len(stash)
        for column, (leaf, lifetime) in enumerate(
            zip((*residuals, *stash), lifetimes, strict=True)
        ):
            key = (leaf.dtype, math.prod(leaf.shape), varying_axes(leaf))
            rings.setdefault(key, leaf)
            leaves.append(RingLeaf(list(rings).index(key), column, *lifetime))
        return cls(tuple(rings.values()), tuple(leaves))

    @property
    def columns(self) -> tuple[RingLeaf, ...]:
        """The first value of each column."""
        firsts: dict[int, RingLeaf] = {}
        for leaf in self.leaves:
            firsts.setdefault(leaf.column, leaf)
        return tuple(firsts.values())


@dataclasses.dataclass(frozen=True, eq=False)
class RingRows:
    """The rows of each layer's values, in every tick in which an action needs them."""

    of_kind: dict[Kind, np.ndarray]
    """int32 [ticks, stages, layers of a chunk, columns]; `NOTHING` where there is none."""
    counts: tuple[int, ...]
    """The number of rows of each ring."""
    behind: bool
    """True if a tick writes its residuals when all its branches have ended. XLA copies most of the
    rings that a branch only hands on."""

    @classmethod
    def of(
        cls, program: TickProgram, pool: RingPool, layers_per_chunk: Sequence[int]
    ) -> "RingRows":
        """Assign the rows, of chunks of so many layers in the model's order."""
        schedule = program.ticks.schedule
        shape = (program.ticks.ticks, schedule.placement.stages, max(layers_per_chunk))
        of_kind = {
            kind: np.full((*shape, len(pool.columns)), NOTHING, np.int32) for kind in schedule.kinds
        }
        behind = program.writes_behind(layers_per_chunk)
        by_ring_and_stage: dict[tuple[int, int], list[_RingInterval]] = {}
        for interval in _intervals(program, pool, layers_per_chunk, behind):
            by_ring_and_stage.setdefault((interval.ring, interval.stage), []).append(interval)
        counts = [0] * len(pool.rings)
        for (ring, _), intervals in by_ring_and_stage.items():
            counts[ring] = max(counts[ring], _assign(intervals, of_kind))
        for leaf in pool.leaves:
            counts[leaf.ring] = counts[pool.columns[leaf.column].ring]
        return cls(of_kind, tuple(counts), behind)


def residual_rows(program: TickProgram, layers_per_chunk: Sequence[int]) -> int:
    """Return the rows of a ring of residuals, of whole backwards; arguments as `RingRows.of`."""
    (rows,) = RingRows.of(program, RingPool.of([None], None, frozenset()), layers_per_chunk).counts
    return rows


class _RingInterval(NamedTuple):
    """Values of one chunk's layers that lie in a ring from one moment to another, both included."""

    ring: int
    stage: int
    start: int
    end: int
    layers: int
    columns: list[int]
    entries: list[tuple[Kind, int]]
    """(kind, tick) of the actions that write or read them."""


def _intervals(
    program: TickProgram, pool: RingPool, layers_per_chunk: Sequence[int], behind: bool
) -> Iterator[_RingInterval]:
    schedule = program.ticks.schedule
    idle = list(_ticks_without_forward(program)) if behind or program.branch_free else []
    tick_of = {action: tick for tick, _, action in program.ticks.actions()}
    alike: dict[tuple[int, Kind, Kind], list[int]] = {}
    for ring, column, first, last in pool.columns:
        alike.setdefault((ring, first, last), []).append(column)
    for (ring, first, last), columns in alike.items():
        between = [kind for kind in schedule.kinds if _rank(first) <= _rank(kind) <= _rank(last)]
        for stage, action in schedule.actions():
            if action.kind is first:
                entries = [(kind, tick_of[action._replace(kind=kind)]) for kind in between]
                start = _moment(Kind.WEIGHT if behind else first, tick_of[action])
                end = _moment(*entries[-1])
                layers = layers_per_chunk[action.chunk]
                yield _RingInterval(ring, stage, start, end, layers, columns, entries)
        if first is Kind.FORWARD:
            for stage, tick in idle:
                moment = _moment(Kind.WEIGHT if behind else first, tick)
                layers = layers_per_chunk[schedule.placement.chunks_of(stage)[0]]
                yield _RingInterval(ring, stage, moment, moment, layers, columns, [(first, tick)])


def _ticks_without_forward(program: TickProgram) -> Iterator[tuple[int, int]]:
    """Yield (stage, tick) where a stage has no forward in a tick in which another has one."""
    idle = program.columns["F.microbatch"] == NOTHING
    for segment in program.segments:
        for tick, form in segment.ticks():
            if Kind.FORWARD in form.kinds:
                yield from ((stage, tick) for stage in np.flatnonzero(idle[tick]).tolist())


def _assign(intervals: list[_RingInterval], of_kind: dict[Kind, np.ndarray]) -> int:
    """Assign rows of one ring on one stage, and return their number."""
    count = 0
    free: list[int] = []
    busy: list[tuple[int, list[int]]] = []
    for interval in sorted(intervals, key=lambda each: (each.start, each.end)):
        while busy and busy[0][0] < interval.start:
            free += heapq.heappop(busy)[1]
        needed = interval.layers * len(interval.columns)
        more = max(needed - len(free), 0)
        free += range(count, count + more)
        count += more
        rows = [free.pop() for _ in range(needed)]
        heapq.heappush(busy, (interval.end, rows))
        table = np.array(rows, np.int32).reshape(interval.layers, -1)
        for kind, tick in interval.entries:
            of_kind[kind][tick, interval.stage][: interval.layers, interval.columns] = table
    return count


def _rank(kind: Kind) -> int:
    return KIND_RANK[kind]


def _moment(kind: Kind, tick: int) -> int:
    return len(KIND_RANK) * tick + KIND_RANK[kind]
