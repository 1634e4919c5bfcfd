"""The simulated timeline of a layout's pipeline, in the mode that will run."""

import dataclasses
from typing import NamedTuple

from geojax.pipeline.orders import ORDERS, EventRequest
from geojax.pipeline.simulation.lock_step import lock_step
from geojax.pipeline.simulation.simulator import simulate
from geojax.pipeline.simulation.timeline import Timeline
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.chunks import chunk_work, site_pieces
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.pipeline import small_program
from geojax.planner.search.request import PlanRequest


class StepTimeline(NamedTuple):
    """A pipeline at work on a few microbatches, whose ramps are those of all of a step's."""

    timeline: Timeline
    sites: tuple[str, ...]
    """Name of each stage's site."""


def step_timeline(
    request: PlanRequest, layout: LayoutCandidate, calibration: Calibration
) -> StepTimeline | None:
    """Simulate the pipeline of a layout; None where it has none.

    Args:
        request: what is asked for.
        layout: how it is run.
        calibration: what accelerators and networks reach of their published rates.
    """
    if layout.pipeline_stages == 1:
        return None
    names = request.topology.site_names
    pieces = site_pieces(request.model, layout, request.topology, calibration, GEOJAX)
    if layout.dc.role == "data":  # a pipeline in each site, here the first
        layout, pieces, names = layout.of_site(0), pieces[:1], names[:1]
    work = chunk_work(request.model, layout, request.topology, pieces)
    table = small_program(layout, work.placement, work.chosen_by).ticks
    sites = tuple(
        name
        for name, count in zip(names, layout.stages_per_site, strict=True)
        for _ in range(count)
    )
    by_events = ORDERS[layout.pipeline.schedule].by_events
    few = table.schedule.microbatches
    if layout.dc.join == "one_program" or by_events is None:
        timeline = lock_step(table, work.costs)
    else:
        limit = layout.pipeline.memory_limit or few
        events = EventRequest(
            layout.stages_per_site, few, work.chosen_by.costs, limit, layout.pipeline.virtual_stages
        )
        timeline = simulate(by_events(events), work.costs)
    name = f"{layout.pipeline.schedule}, {few} of {layout.batch.microbatches} microbatches"
    schedule = dataclasses.replace(timeline.schedule, name=name)
    return StepTimeline(dataclasses.replace(timeline, schedule=schedule), sites)
