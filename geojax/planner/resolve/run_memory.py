"""The memory that a device needs for a run: of one program, or of a site with its own runtime."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from geojax.accelerators import Accelerator
from geojax.config.run_config import RunConfig
from geojax.islands.island_plan import data_part, stage_parts
from geojax.islands.programs.site_part import SitePart
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.stage_lists import data_lists, hops_held, offer_limit_bytes, stage_lists
from geojax.pipeline.schedule import Schedule
from geojax.planner.memory import StepMemory
from geojax.planner.resolve.abstract_site import abstract_programs
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.planner.resolve.site_schedule import (
    bucket_layers,
    event_schedule,
    held_at_once,
    site_work,
)
from geojax.planner.resolve.traced_run import trace_run
from geojax.planner.site_memory import site_memory


class SiteMemory(NamedTuple):
    """The memory of a site with its own runtime, or of that of all stages that needs most."""

    memory: StepMemory
    programs: SitePrograms
    held: int
    """Microbatches that are held at once; with virtual stages counted once for each chunk."""


def run_memory(
    config: RunConfig, accelerator: Accelerator | None, site: int | None = None
) -> StepMemory:
    """Estimate the memory that a step of `config` takes on a device; none is touched.

    Args:
        config: the run of all sites.
        accelerator: the device; a site in role data with its own runtime holds as many microbatches
            as it can.
        site: site, where each has its own runtime; None: that which needs most.

    Raises:
        UserError: the layout cannot be.
    """
    if config.dc.join == "islands":
        return island_memory(config, accelerator, site).memory
    return trace_run(config).memory()


def island_memory(
    config: RunConfig, accelerator: Accelerator | None, site: int | None = None
) -> SiteMemory:
    """Estimate the memory of a site with its own runtime; arguments and errors as `run_memory`."""
    if config.dc.role == "data":
        programs = abstract_programs(config, data_part(config.model, bucket_layers(config)))
        held = held_at_once(config, programs, accelerator)
        activations = held * programs.step_bytes.of_microbatch
        return SiteMemory(site_memory(programs, activations), programs, held)
    schedule, staged = event_schedule(config), chosen_layers(config)
    assert staged is not None, "sites in role stage are stages of a pipeline"
    lists, parts = stage_lists(config, schedule), stage_parts(config.model, staged)
    stages = range(len(parts))
    if site is not None:
        stages = stages[site * config.mesh.stage :][: config.mesh.stage]
    found = []
    for stage in _unlike_stages(schedule, parts, stages):
        programs = abstract_programs(config, parts[stage])
        layers = [0] * schedule.placement.chunks
        for chunk, own in parts[stage].chunks.items():
            layers[chunk] = len(own)
        layer = programs.layer_bytes
        layer = layer if schedule.split_backward else layer.without_split
        activations = schedule.most_held(layers, layer)[stage]
        memory = site_memory(programs, activations, hops_held(lists, stage))
        found.append(SiteMemory(memory, programs, schedule.in_flight[stage]))
    return max(found, key=lambda each: each.memory.bytes)


def offered_bytes(config: RunConfig) -> int:
    """Return the bytes that a device may have offered to one other site, or stage, at a time.

    Raises:
        UserError: the layout cannot be.
    """
    staged = chosen_layers(config)
    if staged is None:
        work = site_work(config, None)
        lists = data_lists(work, config.mesh.dc, config.batch.microbatches)
        part = data_part(config.model, work.layers)
    else:
        lists = stage_lists(config, event_schedule(config))
        part = stage_parts(config.model, staged)[0]
    return offer_limit_bytes(config, lists, abstract_programs(config, part))


def _unlike_stages(
    schedule: Schedule, parts: Sequence[SitePart], stages: Iterable[int]
) -> list[int]:
    """Return of all `stages` with equal programs that which holds most microbatches."""
    most: dict[tuple[object, ...], int] = {}
    for stage in stages:
        part = parts[stage]
        alike = (*map(len, part.chunks.values()), part.has_embedding, part.has_head)
        known = most.setdefault(alike, stage)
        if schedule.in_flight[stage] > schedule.in_flight[known]:
            most[alike] = stage
    return list(most.values())
