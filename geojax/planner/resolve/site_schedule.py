"""The work of sites with runtimes of their own: order of stages, microbatches held at once."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable

from geojax.accelerators import Accelerator
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.island_plan import data_part, stage_parts
from geojax.islands.programs.site_part import bucket_count, even_chunks
from geojax.islands.programs.site_programs import SitePrograms, StepBytes
from geojax.pipeline.earlier_weights import order_within_bytes
from geojax.pipeline.orders import ORDERS, EventRequest
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import MemoryLimit, Placement, Schedule
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.tick_tables import too_much_held
from geojax.planner.resolve.abstract_site import abstract_programs, most_layer_bytes
from geojax.planner.resolve.pipeline_plan import (
    choose_hop_ticks,
    costs_of_stages,
    pipeline_costs,
)
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.quantities import quantity
from geojax.runtime.device_memory import usable_memory
from geojax.sharding import bytes_per_device
from geojax.step.resolved import IslandWork
from geojax.step.stage_layers import StagedLayers


def bucket_layers(config: RunConfig) -> tuple[int, ...]:
    """Return the layers of each chunk of a site in role data."""
    model = config.model
    count = bucket_count(model.num_stacked_layers, config.communication.bucket_layers)
    return tuple(map(len, even_chunks(model, count).values()))


def site_work(config: RunConfig, accelerator: Accelerator | None) -> IslandWork:
    """Return the work of a site in role data, with as many microbatches held as fit.

    Args:
        config: the run of all sites.
        accelerator: the kind of its devices; None: not known, as on CPUs.

    Raises:
        UserError: `pipeline.memory_limit_bytes` is too little for one microbatch, or the layout
            cannot be.
    """
    layers = bucket_layers(config)
    programs = abstract_programs(config, data_part(config.model, layers))
    return IslandWork(layers=layers, held_microbatches=held_at_once(config, programs, accelerator))


@functools.lru_cache(maxsize=4)
def event_schedule(config: RunConfig) -> Schedule:
    """Return the run's schedule for stages that begin an action as soon as its input is there.

    It may take seconds to find, and a run's memory, messages and programs all need it: it is kept.
    Where the times of chunks and hops are not known, a forward and each half of a backward are
    taken to last equally long, and hops to take no time.

    Raises:
        UserError: the schedule cannot keep within the memory limit or take so many microbatches.
    """
    settings, staged = config.pipeline, _staged(config)
    if settings.memory_limit_bytes is None:
        return _event_schedule(config, settings.memory_limit or config.batch.microbatches)
    layer, layers = (
        most_layer_bytes(config, stage_parts(config.model, staged)),
        staged.layers_per_chunk,
    )
    limit: int | MemoryLimit = MemoryLimit(settings.memory_limit_bytes, layers, layer)
    if settings.memory_limit is not None:
        fitting = settings.memory_limit_bytes // (layer.before_backward * max(layers))
        limit = max(1, min(settings.memory_limit, fitting))
    schedule = _event_schedule(config, limit)
    costs = _known(config, pipeline_costs, schedule.placement)
    return order_within_bytes(schedule, layers, layer, settings.memory_limit_bytes, costs)


def _event_schedule(config: RunConfig, limit: int | MemoryLimit) -> Schedule:
    """Return the run's schedule, made for a limit where it can bend."""
    settings, microbatches = config.pipeline, config.batch.microbatches
    entry = schedule_entry(settings.schedule)
    by_events = ORDERS[entry.name].by_events
    if by_events is None:
        return choose_hop_ticks(config, _staged(config)).table.schedule
    request = EventRequest(
        (config.mesh.stage,) * config.pipeline_sites,
        microbatches,
        _known(config, costs_of_stages, Placement.linear(config.pipeline_stages)),
        limit,
        settings.virtual_stages,
    )
    schedule = dataclasses.replace(by_events(request), name=entry.name)
    if settings.memory_limit is not None:
        most, held = settings.memory_limit * settings.virtual_stages, max(schedule.in_flight)
        if held > most:
            raise UserError(too_much_held(entry.name, schedule.placement, held, most))
    return schedule


def _known(config: RunConfig, costs: Callable[[RunConfig], Costs], placement: Placement) -> Costs:
    """Return the times of a microbatch; all actions last as long where they are not known."""
    try:
        return costs(config)
    except UserError:
        return Costs.uniform(placement.chunks, 1.0, 1.0, 1.0)


def _staged(config: RunConfig) -> StagedLayers:
    staged = chosen_layers(config)
    assert staged is not None, "sites in role stage are stages of a pipeline"
    return staged


def held_at_once(config: RunConfig, programs: SitePrograms, accelerator: Accelerator | None) -> int:
    """Return how many microbatches a site in role data holds at once; all if there is no limit.

    Args:
        config: the run of all sites.
        programs: the site's.
        accelerator: the kind of its devices; None: not known, as on CPUs.

    Raises:
        UserError: `pipeline.memory_limit_bytes` is too little for one.
    """
    held, bytes_held = config.pipeline.memory_limit, config.pipeline.memory_limit_bytes
    if bytes_held is not None:
        needed = programs.step_bytes.of_microbatch
        if needed > bytes_held:
            raise UserError(
                f"a site holds {quantity(needed, 'B')} of a microbatch where "
                f"pipeline.memory_limit_bytes is {quantity(bytes_held, 'B')}; "
                f"{quantity(needed, 'B')} would work"
            )
        held = min(held or sys.maxsize, bytes_held // needed)
    if held is None:
        usable = None if accelerator is None else usable_memory(accelerator, os.environ)
        free = None if usable is None else usable.bytes - bytes_per_device(programs.layouts)
        held = held_microbatches(programs.step_bytes, free)
    return min(held, programs.plan.layout.batch.microbatches)


def held_microbatches(step: StepBytes, free_bytes: int | None) -> int:
    """Return how many microbatches a step can hold at once, at least one.

    Args:
        step: the bytes of a step on each device.
        free_bytes: those that the state leaves free; None: not known, as on CPUs.
    """
    if free_bytes is None:
        return sys.maxsize
    compute = step.of_microbatch  # of a chunk under way, besides what it keeps: at most as much
    return max((free_bytes - step.always - compute) // step.of_microbatch, 1)
