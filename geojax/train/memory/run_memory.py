"""The memory that a device needs for a run: of one program, or of a site with its own runtime."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from geojax.accelerators import Accelerator
from geojax.config.run_config import RunConfig
from geojax.islands.programs.site_part import SitePart
from geojax.islands.programs.site_programs import SitePrograms
from geojax.pipeline.schedule import Schedule
from geojax.planner.memory import StepMemory
from geojax.planner.site_memory import site_memory
from geojax.train.islands.abstract_site import abstract_programs
from geojax.train.islands.island_plan import data_part, held_at_once
from geojax.train.islands.island_stages import (
    event_schedule,
    hops_held,
    offered_at_once,
    stage_lists,
    stage_parts,
)
from geojax.train.traced_run import trace_run

_STEPS_IN_FLIGHT = 2
_SCALARS_BYTES = 1 << 20


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
        programs = abstract_programs(config, data_part(config))
        held = held_at_once(config, programs, accelerator)
        activations = held * programs.step_bytes.of_microbatch
        return SiteMemory(site_memory(programs, activations), programs, held)
    schedule, lists, parts = event_schedule(config), stage_lists(config), stage_parts(config)
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


def offer_limit_bytes(config: RunConfig, stages_per_process: int = 1) -> int:
    """Return the bytes that a device may have offered to one other site, or stage, at a time.

    In role data these are the gradients of two steps, in role stage the messages that the schedule
    has under way to a stage, and a tied table's gradient. Nothing is compiled.

    Args:
        config: the run of all sites.
        stages_per_process: stages whose messages to those of another process count together.
    """
    is_stage = config.dc.role == "stage"
    programs = abstract_programs(config, stage_parts(config)[0] if is_stage else data_part(config))
    parameters = programs.layouts.parameters
    if not is_stage:
        return _STEPS_IN_FLIGHT * _shard_bytes(parameters) + _SCALARS_BYTES
    hops = offered_at_once(stage_lists(config), stages_per_process) * programs.hop_bytes
    table = _shard_bytes(parameters["embedding"]) if config.model.tie_word_embeddings else 0
    return hops + table + _SCALARS_BYTES


def _shard_bytes(layouts: Any) -> int:
    leaves = jax.tree.leaves(layouts)
    return sum(math.prod(leaf.shard_shape) * leaf.dtype.itemsize for leaf in leaves)


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
