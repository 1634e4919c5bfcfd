"""Sites with runtimes of their own as stages of one pipeline: their parts and their work."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.actions import (
    Receive,
    Send,
    SiteAction,
    fetched_ahead,
    forward_actions,
    stage_actions,
    windows,
)
from geojax.islands.programs.site_part import SitePart
from geojax.pipeline.earlier_weights import order_within_bytes
from geojax.pipeline.registry import EventRequest, schedule_entry
from geojax.pipeline.schedule import Action, MemoryLimit, Placement, Schedule
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.tick_tables import too_much_held
from geojax.step.stage_layers import StagedLayers
from geojax.train.islands.abstract_site import most_layer_bytes
from geojax.train.plan.pipeline_plan import choose_hop_ticks, staged_layers, staged_model

Lists = Sequence[Sequence[SiteAction]]
"""The actions of each stage; in role data, and with one stage a site, a stage is a site."""


def stage_parts(config: RunConfig) -> list[SitePart]:
    """Return the part of each stage: the layers that it has in one program."""
    staged = _staged(config)
    ends = [sum(staged.layers_per_chunk[: chunk + 1]) for chunk in range(staged.placement.chunks)]
    layers = [
        range(end - count, end) for end, count in zip(ends, staged.layers_per_chunk, strict=True)
    ]
    return [
        SitePart(
            config.model, {chunk: layers[chunk] for chunk in staged.placement.chunks_of(stage)}
        )
        for stage in range(staged.placement.stages)
    ]


def stage_costs(config: RunConfig) -> Costs:
    """Return the times of a microbatch in a pipeline of one chunk a stage.

    Raises:
        UserError: there is no topology, or it does not say enough.
    """
    return staged_model(config, _staged(config)).costs(Placement.linear(config.pipeline_stages))


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
    layer, layers = most_layer_bytes(config, stage_parts(config)), staged.layers_per_chunk
    limit: int | MemoryLimit = MemoryLimit(settings.memory_limit_bytes, layers, layer)
    if settings.memory_limit is not None:
        fitting = settings.memory_limit_bytes // (layer.before_backward * max(layers))
        limit = max(1, min(settings.memory_limit, fitting))
    schedule = _event_schedule(config, limit)
    costs = _costs(config, schedule.placement)
    return order_within_bytes(schedule, layers, layer, settings.memory_limit_bytes, costs)


def _event_schedule(config: RunConfig, limit: int | MemoryLimit) -> Schedule:
    """Return the run's schedule, made for a limit where it can bend."""
    settings, microbatches = config.pipeline, config.batch.microbatches
    entry = schedule_entry(settings.schedule)
    if entry.event_order is None:
        return choose_hop_ticks(config, _staged(config)).table.schedule
    request = EventRequest(
        (config.mesh.stage,) * config.pipeline_sites,
        microbatches,
        _costs(config, Placement.linear(config.pipeline_stages)),
        limit,
        settings.virtual_stages,
    )
    schedule = dataclasses.replace(entry.event_order(request), name=entry.name)
    if settings.memory_limit is not None:
        most, held = settings.memory_limit * settings.virtual_stages, max(schedule.in_flight)
        if held > most:
            raise UserError(too_much_held(entry.name, schedule.placement, held, most))
    return schedule


def _costs(config: RunConfig, placement: Placement) -> Costs:
    """Return the times of a microbatch; all actions last as long where they are not known."""
    try:
        return staged_model(config, _staged(config)).costs(placement)
    except UserError:
        return Costs.uniform(placement.chunks, 1.0, 1.0, 1.0)


def stage_lists(config: RunConfig) -> Lists:
    """List the actions of each stage in a step, in the order of the config's schedule.

    Raises:
        UserError: as `event_schedule`.
    """
    schedule = event_schedule(config)
    tied, count = config.model.tie_word_embeddings, config.mesh.stage
    return [
        stage_actions(schedule, stage, tied=tied, stages_per_site=count)
        for stage in range(config.pipeline_stages)
    ]


def validation_lists(config: RunConfig) -> Lists:
    """List the actions of each stage in a validation."""
    placement, microbatches = _staged(config).placement, config.batch.microbatches
    stages = range(placement.stages)
    return [forward_actions(placement, microbatches, stage) for stage in stages]


def hops_held(lists: Lists, stage: int) -> int:
    """Return the most messages that a stage holds of hops to and from the others."""
    hops = _hops(lists)
    receivers = {action.site for action in lists[stage] if isinstance(action, Send)}
    offered = sum(fetched_ahead(hops, receiver)[stage] for receiver in receivers)
    return offered + sum(fetched_ahead(hops, stage).values())


def offered_at_once(lists: Lists, stages_per_process: int = 1) -> int:
    """Return the most hops that a process has offered to another one that has not taken them.

    Args:
        lists: the actions of each stage.
        stages_per_process: stages that a process holds a part of; 1: at most one.
    """
    offered: Counter[tuple[int, int]] = Counter()
    for (sender, receiver), count in windows(_hops(lists)).items():
        offered[sender // stages_per_process, receiver // stages_per_process] += count
    return max(count for (sender, receiver), count in offered.items() if sender != receiver)


def _hops(lists: Lists) -> Lists:
    """Return the lists without sums and updates."""
    return [[each for each in own if isinstance(each, Action | Receive | Send)] for own in lists]


def _staged(config: RunConfig) -> StagedLayers:
    staged = staged_layers(config)
    assert staged is not None, "sites in role stage are stages of a pipeline"
    return staged
