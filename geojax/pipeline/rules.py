"""Rules that every schedule keeps, each with a name."""

import enum
from collections import Counter

from geojax.errors import UserError
from geojax.pipeline.schedule import KIND_RANK, Action, Kind, Schedule, TickTable


class Invariant(enum.Enum):
    """A rule that a schedule or a table of ticks must keep."""

    COMPLETE = "every microbatch runs once forward, once backward, once for weights in every chunk"
    PLACED = "a stage works on its own chunks only"
    CAN_FINISH = "no stage waits for what only comes later"
    WITHIN_LIMIT = "no stage holds more microbatches than the limit"
    IN_STEP = "a stage's ticks never fall, and one tick holds at most one action of a kind, F, B, W"
    ARRIVED = "what an action needs was sent at least the hop's ticks before"


class ScheduleError(UserError):
    """A schedule breaks an invariant; the message says which one, and where."""

    def __init__(self, name: str, invariant: Invariant, place: str) -> None:
        super().__init__(
            f"the schedule '{name}' is not valid: {place}; rule {invariant.name}: {invariant.value}"
        )
        self.invariant = invariant


def requirement(schedule: Schedule, action: Action) -> Action | None:
    """Return the action that must end before; None for the forward of the first chunk."""
    kind, microbatch, chunk = action
    if kind is Kind.FORWARD:
        return Action(kind, microbatch, chunk - 1) if chunk else None
    if kind is Kind.WEIGHT:
        return Action(Kind.BACKWARD, microbatch, chunk)
    if chunk == schedule.placement.chunks - 1:
        return Action(Kind.FORWARD, microbatch, chunk)
    return Action(kind, microbatch, chunk + 1)


def validate(schedule: Schedule, limit: int | None = None) -> None:
    """Check that a schedule is complete, can finish and stays within a memory limit.

    `limit` is the most (microbatch, chunk) pairs that a stage may hold at a time.

    Raises:
        ScheduleError: it breaks one of COMPLETE, PLACED, CAN_FINISH, WITHIN_LIMIT.
    """
    _check_complete(schedule)
    _check_can_finish(schedule)
    if limit is not None:
        for stage, held in enumerate(schedule.in_flight):
            if held > limit:
                place = f"stage {stage} holds {held} where the limit is {limit}"
                raise ScheduleError(schedule.name, Invariant.WITHIN_LIMIT, place)


def validate_table(table: TickTable, limit: int | None = None) -> None:
    """Check a table of ticks, and the schedule in it.

    Raises:
        ScheduleError: the schedule breaks a rule of `validate`, or the ticks one of IN_STEP,
            ARRIVED.
    """
    schedule = table.schedule
    validate(schedule, limit)
    for hops in (table.hop_ticks, table.return_ticks):
        assert len(hops) == schedule.placement.chunks - 1, "one hop for each pair of chunks"
        assert all(ticks >= 1 for ticks in hops), "a hop takes one tick at least"
    for stage, (order, starts) in enumerate(zip(schedule.orders, table.starts, strict=True)):
        previous = (-1, 0)
        for action, tick in zip(order, starts, strict=True):
            if (tick, KIND_RANK[action.kind]) <= previous:
                place = f"stage {stage} begins {action} in tick {tick}, after tick {previous[0]}"
                raise ScheduleError(schedule.name, Invariant.IN_STEP, place)
            previous = (tick, KIND_RANK[action.kind])
    tick_of = {action: tick for tick, _, action in table.actions()}
    for action, tick in tick_of.items():
        needed = requirement(schedule, action)
        if needed is None:
            continue
        wait = 0
        if needed.chunk != action.chunk:
            wait = table.ticks_of_hop(needed.kind, min(needed.chunk, action.chunk))
        if tick < tick_of[needed] + wait:
            place = (
                f"{action} in tick {tick} needs {needed} of tick {tick_of[needed]}, which takes "
                f"{wait} ticks"
            )
            raise ScheduleError(schedule.name, Invariant.ARRIVED, place)


def _check_complete(schedule: Schedule) -> None:
    placement = schedule.placement
    counts: Counter[Action] = Counter()
    for stage, action in schedule.actions():
        if not 0 <= action.chunk < placement.chunks or placement.stage_of[action.chunk] != stage:
            place = f"stage {stage} runs {action}"
            raise ScheduleError(schedule.name, Invariant.PLACED, place)
        counts[action] += 1
    for kind in schedule.kinds:
        for microbatch in range(schedule.microbatches):
            for chunk in range(placement.chunks):
                action = Action(kind, microbatch, chunk)
                if counts.pop(action, 0) != 1:
                    place = f"{action} does not run exactly once"
                    raise ScheduleError(schedule.name, Invariant.COMPLETE, place)
    for action in counts:
        place = f"{action} is not among its {schedule.microbatches} microbatches and its kinds"
        raise ScheduleError(schedule.name, Invariant.COMPLETE, place)


def _check_can_finish(schedule: Schedule) -> None:
    """Walk all orders as far as they go."""
    done: set[Action] = set()
    waiting: dict[Action, int] = {}
    position = [0] * schedule.placement.stages
    ready = list(range(schedule.placement.stages))
    while ready:
        stage = ready.pop()
        order = schedule.orders[stage]
        while position[stage] < len(order):
            action = order[position[stage]]
            needed = requirement(schedule, action)
            if needed is not None and needed not in done:
                waiting[needed] = stage
                break
            done.add(action)
            position[stage] += 1
            if action in waiting:
                ready.append(waiting.pop(action))
    for needed, stage in waiting.items():
        place = f"stage {stage} waits at {schedule.orders[stage][position[stage]]} for {needed}"
        raise ScheduleError(schedule.name, Invariant.CAN_FINISH, place)
