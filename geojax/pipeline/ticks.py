"""Tables of ticks: schedules for stages that work in lock-step, made in the units of its ticks.

A tick is one of two things:

    paired    a forward and a backward: one microbatch passes in one tick of f + b, while a stage
              that does only one of them waits. Full speed takes twice 1F1B's microbatches.
    single    one action, F, B or W, at the cost of the longest: 2 max(f, b) a microbatch, in the
              memory of the event-driven schedule; and the ticks of split backwards.

An order that is best where stages do not wait for each other (`geojax.pipeline.simulator`) is not
in lock-step: while some stages run a forward others run a backward, and all wait for these.
"""

from collections.abc import Sequence

from geojax.pipeline.schedule import KIND_RANK, Action, Schedule, TickTable
from geojax.pipeline.validate import requirement, validate


def in_ticks(schedule: Schedule, hop_ticks: Sequence[int], *, paired: bool) -> TickTable:
    """Every action in the earliest tick that its stage's order and its input allow.

    `hop_ticks` has one entry for each chunk and its successor, as `TickTable` has. With `paired` a
    tick may hold a forward, a backward and a gradient of weights of the same stage, in that order.

    Raises:
        ScheduleError: the schedule cannot finish.
    """
    tick_of: dict[Action, int] = {}
    starts: list[list[int]] = [[] for _ in schedule.orders]
    waiting: dict[Action, int] = {}
    ready = list(range(len(schedule.orders)))
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
                tick = ticks[-1] if paired and follows else ticks[-1] + 1
            if needed is not None:
                hop = min(needed.chunk, action.chunk)
                wait = 0 if needed.chunk == action.chunk else hop_ticks[hop]
                tick = max(tick, tick_of[needed] + wait)
            tick_of[action] = tick
            ticks.append(tick)
            if action in waiting:
                ready.append(waiting.pop(action))
    if waiting:
        validate(schedule)
        raise AssertionError("a schedule that keeps the rules finishes")
    return TickTable(schedule, tuple(hop_ticks), tuple(map(tuple, starts)))
