"""Schedules on one pipeline, timed with stages on their own and with stages in lock-step."""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from geojax.errors import UserError
from geojax.pipeline.orders import ORDERS, EventRequest
from geojax.pipeline.registry import SCHEDULES, ScheduleEntry, schedule_entry
from geojax.pipeline.schedule import Placement, Schedule, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step
from geojax.pipeline.simulation.simulator import simulate
from geojax.pipeline.simulation.timeline import Timeline
from geojax.pipeline.tick_tables import best_tick_table, tick_table


@dataclasses.dataclass(frozen=True)
class TimedSchedule:
    """One schedule, timed in both modes."""

    event_driven: Timeline
    """Each stage begins an action as soon as its input has arrived."""
    lock_step: Timeline | None
    """All stages wait for each other at every tick; None: the schedule would hold more then."""

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self.event_driven.schedule.name

    @property
    def microbatches_in_flight(self) -> Fraction:
        """The most that a stage has in flight, in microbatches of the whole stage."""
        placement = self.event_driven.schedule.placement
        return max(
            Fraction(pairs, len(placement.chunks_of(stage)))
            for stage, pairs in enumerate(self.event_driven.in_flight)
        )


@dataclasses.dataclass(frozen=True)
class ScheduleComparison:
    """Schedules timed on one pipeline."""

    entries: tuple[TimedSchedule, ...]
    left_out: dict[str, str]
    """The reason for each schedule that this pipeline cannot have."""

    def best(self, memory_limit: int, *, in_lock_step: bool) -> tuple[str, float] | None:
        """Return the name and seconds of the fastest schedule within a limit of microbatches.

        None: all hold more.
        """
        found = [
            (timeline.seconds, entry.name)
            for entry in self.entries
            for timeline in [entry.lock_step if in_lock_step else entry.event_driven]
            if timeline is not None and entry.microbatches_in_flight <= memory_limit
        ]
        return min(found)[::-1] if found else None


def compare(
    costs: Callable[[Placement], Costs],
    stages_per_site: Sequence[int],
    microbatches: int,
    memory_limit: int,
    chunks_per_stage: int,
    hop_ticks: int | None = None,
    names: Sequence[str] = (),
) -> ScheduleComparison:
    """Generate and time schedules.

    Args:
        costs: returns the times of a microbatch with its chunks on the stages of a placement.
        stages_per_site: stages in each site, in the pipeline's order.
        microbatches: of an iteration.
        memory_limit: the most microbatches that `latency_hiding` may keep on a stage; the others
            keep what they keep.
        chunks_per_stage: of the interleaved schedule.
        hop_ticks: of messages between sites in lock-step; None: as many as suit each schedule.
        names: of the schedules; none: all of the registry.

    Raises:
        UserError: `costs` refuses a chunk on each stage, or there is no schedule of such a name.
    """
    sites = tuple(stages_per_site)
    linear = costs(Placement.linear(sum(sites)))
    request = EventRequest(sites, microbatches, linear, memory_limit, chunks_per_stage)
    found, left_out = [], {}
    for name in names or SCHEDULES:
        entry = schedule_entry(name)
        try:
            schedule = _event_order(entry, request, hop_ticks)
            own = costs(schedule.placement)
            in_step = in_lock_step(schedule, own, hop_ticks)
            found.append(TimedSchedule(simulate(schedule, own), in_step))
        except UserError as reason:  # of this schedule alone: the linear placement has its costs
            left_out[name] = str(reason)
    return ScheduleComparison(tuple(found), left_out)


def _event_order(entry: ScheduleEntry, request: EventRequest, hop_ticks: int | None) -> Schedule:
    by_events = ORDERS[entry.name].by_events
    if by_events is None:
        chunks = entry.virtual_stages or request.virtual_stages
        placement = entry.placement(request.stages_per_site, chunks)
        table = _table(entry.name, placement, request.microbatches, request.costs, None, hop_ticks)
        return table.schedule
    return dataclasses.replace(by_events(request), name=entry.name)


def in_lock_step(schedule: Schedule, costs: Costs, hop_ticks: int | None) -> Timeline | None:
    """Time the table that the executor of one program has for a schedule, in the same memory.

    None: in ticks the schedule holds more.
    """
    limit = max(schedule.in_flight)
    placement, microbatches = schedule.placement, schedule.microbatches
    try:
        table = _table(schedule.name, placement, microbatches, costs, limit, hop_ticks)
    except UserError:  # over the limit
        return None
    timeline = lock_step(table, costs)
    titled = dataclasses.replace(timeline.schedule, name=f"{schedule.name}, lock-step")
    return dataclasses.replace(timeline, schedule=titled)


def _table(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: int | None,
    hop_ticks: int | None,
) -> TickTable:
    if hop_ticks is None:
        return best_tick_table(name, placement, microbatches, costs, limit)
    of_hops = [1 if hop.link is None else hop_ticks for hop in costs.hops]
    return tick_table(name, placement, microbatches, of_hops, limit, costs=costs)
