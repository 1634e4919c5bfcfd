"""Time of a pipeline's iteration, by the simulator in the mode that will run.

Stages of one program run in lock-step, tick by tick; islands, and the frameworks that published
times are of, event by event. From some number of microbatches on, each further group of them
takes as long as the one before: of many microbatches two small numbers are simulated.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from geojax.pipeline.earlier_weights import within_bytes
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.pipeline.orders import ORDERS, EventRequest
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import LayerBytes, Placement, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step_seconds
from geojax.pipeline.simulation.simulator import iteration_seconds
from geojax.pipeline.tick_tables import candidate_tables, fastest, near_or_delayed
from geojax.planner.cost.layout import LayoutCandidate


class PipelineTime(NamedTuple):
    """Seconds of all microbatches' forwards and backwards."""

    seconds: float
    inside_sites: float
    """Seconds if messages over links took no time."""
    link_messages: float
    """Messages over a cut, both ways; in lock-step ticks without work send them too."""


class ChosenBy(NamedTuple):
    """Figures by which a program chooses its ticks, or its order of work."""

    costs: Costs
    """The times of each chunk, and of the hops between them."""
    layers: tuple[int, ...] = ()
    """Layers of each chunk."""
    layer: LayerBytes | None = None
    """Bytes that a layer holds, so that one program does not put off gradients of weights in more
    memory than its forwards need; None: it does not look at memory."""
    joint: bool = False
    """A stage's passes of one tick are one branch; loops over ticks then send what these need."""


def pipeline_time(
    layout: LayoutCandidate,
    placement: Placement,
    costs: Costs,
    *,
    lock_step: bool,
    late_receives: bool = False,
    chosen_by: ChosenBy | None = None,
) -> PipelineTime:
    """Return the time of an iteration of the layout's schedule.

    Args:
        layout: the stages, the schedule and its microbatches.
        placement: the stage of each chunk.
        costs: the times of each chunk, and of the hops between them.
        lock_step: stages wait for each other's ticks.
        late_receives: stages that do not wait post a receive only when they are free.
        chosen_by: the figures by which the program chooses its ticks or order; None: `costs`.

    Raises:
        UserError: the schedule cannot be made for the layout.
    """
    chosen_by = chosen_by or ChosenBy(costs)
    run: Callable[..., float] = functools.partial(_lock_step, chosen_by=chosen_by)
    if not lock_step:
        run = functools.partial(_by_events, chosen_by=chosen_by, late_receives=late_receives)
    seconds = _extrapolated(layout, placement, costs, run)
    cuts = sum(hop.link is not None for hop in costs.hops)
    if not cuts:
        return PipelineTime(seconds, seconds, 0.0)
    messages = 2.0 * layout.batch.microbatches * cuts / (layout.mesh.dc - 1)
    if lock_step:
        sent = functools.partial(_sent_in_ticks, chosen_by=chosen_by)
        messages = _extrapolated(layout, placement, costs, sent)
    inside_sites = _extrapolated(layout, placement, costs.inside_sites, run)
    return PipelineTime(seconds, inside_sites, messages)


def small_program(
    layout: LayoutCandidate, placement: Placement, chosen_by: ChosenBy
) -> TickProgram:
    """Return the ticks of a few microbatches, the last of which are those of many.

    Args:
        layout: the stages, the schedule and its microbatches.
        placement: the stage of each chunk.
        chosen_by: the figures by which the program chooses its ticks.
    """
    few, _ = _few(layout, chosen_by.costs)
    table = _table_in_memory(layout, placement, chosen_by, min(few, layout.batch.microbatches))
    return _program(table, layout, chosen_by)


def _extrapolated(
    layout: LayoutCandidate, placement: Placement, costs: Costs, figure: Callable[..., float]
) -> float:
    """Return a figure of an iteration that grows evenly with its microbatches."""
    microbatches = layout.batch.microbatches
    few, more = _few(layout, costs)
    run = functools.partial(figure, layout, placement, costs)
    if microbatches <= more:
        return run(microbatches)
    first, second = run(few), run(more)
    return second + (microbatches - more) * (second - first) / (more - few)


def _few(layout: LayoutCandidate, costs: Costs) -> tuple[int, int]:
    """Return two numbers of microbatches, in whole groups, that warm-up does not fill."""
    stages, group = layout.pipeline_stages, max(layout.stages_per_site)
    busiest = max(costs.work)
    round_trip = 2 * sum(hop.seconds for hop in costs.hops if hop.link is not None)
    ahead = math.ceil(round_trip / (busiest * layout.pipeline.virtual_stages))
    groups = -(-(stages + ahead) // group)
    if round_trip:  # waits for a link go round the stages before they repeat
        groups *= 2
    return groups * group, 2 * groups * group


def _by_events(
    layout: LayoutCandidate,
    placement: Placement,
    costs: Costs,
    microbatches: int,
    *,
    chosen_by: ChosenBy,
    late_receives: bool,
) -> float:
    by_events = ORDERS[layout.pipeline.schedule].by_events
    if by_events is None:
        schedule = _chosen_table(layout, placement, chosen_by.costs, microbatches).schedule
    else:
        limit = layout.pipeline.memory_limit or microbatches
        request = EventRequest(
            layout.stages_per_site,
            microbatches,
            chosen_by.costs,
            limit,
            layout.pipeline.virtual_stages,
        )
        schedule = by_events(request)
    return iteration_seconds(schedule, costs, late_receives=late_receives)


def _lock_step(
    layout: LayoutCandidate,
    placement: Placement,
    costs: Costs,
    microbatches: int,
    *,
    chosen_by: ChosenBy,
) -> float:
    return lock_step_seconds(_table_in_memory(layout, placement, chosen_by, microbatches), costs)


def _sent_in_ticks(
    layout: LayoutCandidate,
    placement: Placement,
    costs: Costs,
    microbatches: int,
    *,
    chosen_by: ChosenBy,
) -> float:
    """Count the ticks of the channels that cross a cut; `costs` say nothing of them."""
    table = _table_in_memory(layout, placement, chosen_by, microbatches)
    program = _program(table, layout, chosen_by)
    site_of = layout.site_of_stages
    crossing = {
        number
        for number, channel in enumerate(program.channels)
        if any(site_of[source] != site_of[target] for source, target in channel.pairs)
    }
    forms = (form for segment in program.segments for _, form in segment.ticks())
    return float(sum(len(crossing.intersection(form.channels)) for form in forms))


@functools.lru_cache(maxsize=64)
def _table_in_memory(
    layout: LayoutCandidate, placement: Placement, chosen_by: ChosenBy, microbatches: int
) -> TickTable:
    """Return the tick table that a run chooses, with gradients of weights as early as it runs."""
    table = _chosen_table(layout, placement, chosen_by.costs, microbatches)
    if chosen_by.layer is None or not table.schedule.split_backward:
        return table
    return within_bytes(table, chosen_by.layers, chosen_by.layer)


@functools.lru_cache(maxsize=64)
def _chosen_table(
    layout: LayoutCandidate, placement: Placement, costs: Costs, microbatches: int
) -> TickTable:
    """Return the tick table that a run chooses, with one or two ticks to a link."""
    limit = (
        layout.pipeline.memory_limit
        and layout.pipeline.memory_limit * layout.pipeline.virtual_stages
    )

    def table(ticks: int) -> TickTable:
        hop_ticks = _hop_ticks(layout, placement, ticks)
        return fastest(
            _candidates(layout.pipeline.schedule, placement, microbatches, hop_ticks, limit), costs
        )

    if layout.pipeline.hop_ticks != "auto":
        return table(layout.pipeline.hop_ticks)
    return near_or_delayed(table, costs)


def _hop_ticks(layout: LayoutCandidate, placement: Placement, ticks: int) -> tuple[int, ...]:
    """Return the ticks of each chunk's hop: one inside a site, `ticks` between sites."""
    site_of = layout.site_of_stages
    return tuple(
        1 if site_of[source] == site_of[target] else ticks
        for source, target in itertools.pairwise(placement.stage_of)
    )


@functools.lru_cache(maxsize=512)
def _candidates(
    schedule: str,
    placement: Placement,
    microbatches: int,
    hop_ticks: tuple[int, ...],
    limit: int | None,
) -> tuple[TickTable, ...]:
    return tuple(candidate_tables(schedule, placement, microbatches, hop_ticks, limit))


@functools.lru_cache(maxsize=64)
def _program(table: TickTable, layout: LayoutCandidate, chosen_by: ChosenBy) -> TickProgram:
    return TickProgram.of(
        table,
        branch_free=schedule_entry(layout.pipeline.schedule).branch_free,
        joint=chosen_by.joint,
        shares_head=bool(chosen_by.costs.head),
        shares_embedding=layout.shares_vocabulary,
    )
