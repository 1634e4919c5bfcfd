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

from geojax.pipeline.schedule import KIND_RANK, Action, Kind, Schedule, TickTable
from geojax.pipeline.validate import requirement, validate


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
    tick_of: dict[Action, int] = {}
    starts: list[list[int]] = [[] for _ in schedule.orders]
    waiting: dict[Action, int] = {}
    ready = list(range(len(schedule.orders)))
    turns = len(schedule.kinds)
    while ready:
        stage = ready.pop()
        order, ticks = schedule.orders[stage], starts[stage]
        while len(ticks) < len(order):
            action = order[len(ticks)]
            needed = requirement(schedule, action)
            if needed is not None and needed not in tick_of:
                waiting[needed] = stage
                break
            tick = 0
            if ticks:
                follows = KIND_RANK[action.kind] > KIND_RANK[order[len(ticks) - 1].kind]
                beside = packing is Packing.TOGETHER and follows
                tick = ticks[-1] if beside else ticks[-1] + 1
            if needed is not None and needed.chunk == action.chunk:
                tick = max(tick, tick_of[needed])
            elif needed is not None:
                hops = hop_ticks if action.kind is Kind.FORWARD else return_ticks
                tick = max(tick, tick_of[needed] + hops[min(needed.chunk, action.chunk)])
            if packing is Packing.IN_TURN:
                tick += (KIND_RANK[action.kind] - tick) % turns
            tick_of[action] = tick
            ticks.append(tick)
            if action in waiting:
                ready.append(waiting.pop(action))
    if waiting:
        validate(schedule)
        raise AssertionError("a schedule that keeps the rules finishes")
    return TickTable(schedule, tuple(hop_ticks), tuple(return_ticks), tuple(map(tuple, starts)))
