"""Time of a pipeline's iteration, by the simulator in the mode that will run.

Stages of one program run in lock-step, tick by tick; islands, and the frameworks that published
times are of, event by event. From some number of microbatches on, each further group of them
takes as long as the one before: of many microbatches two small numbers are simulated.
"""

import functools
import math
from typing import NamedTuple

from geojax.pipeline.registry import EventRequest, schedule_entry
from geojax.pipeline.schedule import Placement, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step_seconds
from geojax.pipeline.simulation.simulator import iteration_seconds
from geojax.pipeline.tick_tables import hops_between_sites, tick_table
from geojax.planner.cost.layout import Layout


class PipelineTime(NamedTuple):
    """Seconds of all microbatches' forwards and backwards."""

    seconds: float
    inside_sites: float
    """Seconds if messages over links took no time."""


def pipeline_time(
    layout: Layout, placement: Placement, costs: Costs, *, lock_step: bool
) -> PipelineTime:
    """Return the time of an iteration of the layout's schedule.

    Raises:
        UserError: the schedule cannot be made for the layout.
    """
    seconds = _seconds(layout, placement, costs, lock_step)
    if all(hop.link is None for hop in costs.hops):
        return PipelineTime(seconds, seconds)
    return PipelineTime(seconds, _seconds(layout, placement, costs.inside_sites, lock_step))


def small_table(layout: Layout, placement: Placement, costs: Costs) -> TickTable:
    """Return the tick table of a few microbatches, whose last ticks are those of many."""
    few, _ = _few(layout, costs)
    return _table(layout, placement, costs, min(few, layout.microbatches))


def _seconds(layout: Layout, placement: Placement, costs: Costs, lock_step: bool) -> float:
    microbatches = layout.microbatches
    few, more = _few(layout, costs)
    run = functools.partial(_lock_step if lock_step else _by_events, layout, placement, costs)
    if microbatches <= more:
        return run(microbatches)
    first, second = run(few), run(more)
    return second + (microbatches - more) * (second - first) / (more - few)


def _few(layout: Layout, costs: Costs) -> tuple[int, int]:
    """Return two numbers of microbatches, in whole groups, that warm-up does not fill."""
    stages, group = layout.pipeline_stages, max(layout.stages_per_site)
    busiest = max(map(sum, zip(costs.forward, costs.backward, costs.weight, strict=True)))
    round_trip = 2 * sum(hop.seconds for hop in costs.hops if hop.link is not None)
    ahead = math.ceil(round_trip / (busiest * layout.virtual_stages))
    groups = -(-(2 * (stages + ahead)) // group)
    extra = -(-(stages + ahead) // group)
    return groups * group, (groups + extra) * group


def _by_events(layout: Layout, placement: Placement, costs: Costs, microbatches: int) -> float:
    entry = schedule_entry(layout.schedule)
    if entry.event_order is None:
        schedule = _table(layout, placement, costs, microbatches).schedule
    else:
        limit = layout.memory_limit or microbatches
        request = EventRequest(
            layout.stages_per_site, microbatches, costs, limit, layout.virtual_stages
        )
        schedule = entry.event_order(request)
    return iteration_seconds(schedule, costs)


def _lock_step(layout: Layout, placement: Placement, costs: Costs, microbatches: int) -> float:
    return lock_step_seconds(_table(layout, placement, costs, microbatches), costs)


def _table(layout: Layout, placement: Placement, costs: Costs, microbatches: int) -> TickTable:
    """Return the tick table with the hop ticks that a run would choose: one or two."""
    limit = layout.memory_limit and layout.memory_limit * layout.virtual_stages
    crosses = len(layout.stages_per_site) > 1
    tables = [
        tick_table(
            layout.schedule,
            placement,
            microbatches,
            hops_between_sites(placement, layout.stages_per_site[0], ticks),
            limit,
            costs=costs,
        )
        for ticks in ((1, 2) if crosses else (1,))
    ]
    return min(tables, key=lambda table: lock_step_seconds(table, costs))
