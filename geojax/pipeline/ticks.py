"""Tables of ticks: schedules for stages that work in lock-step, made in the units of its ticks.

An order that is best where stages do not wait for each other (see the simulator) is not in
lock-step: while some stages run a forward others run a backward, and all wait for these. With f and
b the seconds of a forward and a backward, the ticks of a `Packing` cost

    single      2 max(f, b) a microbatch, in the memory of the event-driven schedule
    together    f + b, as one microbatch passes in each tick, while a stage that has only one of
                the two waits. Full speed takes twice 1F1B's microbatches.
    in turn     f + b in that memory too. All stages run forwards in one tick and backwards in the
                next, so that a forward's message has a tick of b to travel in, a backward's one of
                f, before anything waits for it; and no stage waits at the two ends.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from geojax.pipeline.rules import requirement, validate
from geojax.pipeline.schedule import KIND_RANK, Action, Kind, Schedule, TickTable


class Packing(enum.Enum):
    """The actions that one tick of a table may hold."""

    SINGLE = "one action of any kind on each stage"
    TOGETHER = "on each stage one action of each kind, in their order"
    IN_TURN = "one action of one kind, the same on all stages: the kinds take turns"


def in_ticks(
    schedule: Schedule, hop_ticks: Sequence[int], return_ticks: Sequence[int], packing: Packing
) -> TickTable:
    """Every action in the earliest tick that its stage's order and its input allow.

    `hop_ticks` and `return_ticks` have one entry for each chunk and its successor, as `TickTable`
    has.

    Raises:
        ScheduleError: the schedule cannot finish.
    """
    inputs = _inputs(schedule, hop_ticks, return_ticks)
    # A plan makes thousands of tables: a row for each chunk's actions of a kind, with an entry a
    # microbatch, takes half the time of a dict with actions as its keys.
    tick_of: list[list[int | None]] = [[None] * schedule.microbatches for _ in inputs]
    starts: list[list[int]] = [[] for _ in schedule.orders]
    waiting: dict[tuple[int, int], int] = {}
    ready = list(range(len(schedule.orders)))
    chunks, turns = schedule.placement.chunks, len(schedule.kinds)
    while ready:
        stage = ready.pop()
        order, ticks = schedule.orders[stage], starts[stage]
        previous = KIND_RANK[order[len(ticks) - 1].kind] if ticks else None
        for kind, microbatch, chunk in order[len(ticks) :]:
            rank = KIND_RANK[kind]
            row = rank * chunks + chunk
            tick = 0
            if previous is not None:
                beside = packing is Packing.TOGETHER and rank > previous
                tick = ticks[-1] if beside else ticks[-1] + 1
            needed = inputs[row]
            if needed is not None:
                made = tick_of[needed.row][microbatch]
                if made is None:
                    waiting[needed.row, microbatch] = stage
                    break
                tick = max(tick, made + needed.ticks)
            if packing is Packing.IN_TURN:
                tick += (rank - tick) % turns
            tick_of[row][microbatch] = tick
            ticks.append(tick)
            previous = rank
            if (row, microbatch) in waiting:
                ready.append(waiting.pop((row, microbatch)))
    if waiting:
        validate(schedule)
        raise AssertionError("a schedule that keeps the rules finishes")
    return TickTable(schedule, tuple(hop_ticks), tuple(return_ticks), tuple(map(tuple, starts)))


class _Input(NamedTuple):
    """The action that another one of the same microbatch needs."""

    row: int
    """The number of its kind and chunk."""
    ticks: int
    """The fewest ticks after it."""


def _inputs(
    schedule: Schedule, hop_ticks: Sequence[int], return_ticks: Sequence[int]
) -> list[_Input | None]:
    """List what the actions of each kind and chunk need, kind by kind as `KIND_RANK` has them."""
    chunks = schedule.placement.chunks
    inputs: list[_Input | None] = []
    for kind in KIND_RANK:
        hops = hop_ticks if kind is Kind.FORWARD else return_ticks
        for chunk in range(chunks):
            needed = requirement(schedule, Action(kind, 0, chunk))
            if needed is None:
                inputs.append(None)
                continue
            boundary = min(needed.chunk, chunk)
            ticks = 0 if needed.chunk == chunk else hops[boundary]
            inputs.append(_Input(KIND_RANK[needed.kind] * chunks + needed.chunk, ticks))
    return inputs
