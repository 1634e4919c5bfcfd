"""The memory that a device needs for a run: of one program, or of a site with its own runtime."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from geojax.accelerators import Accelerator
from geojax.config.run_config import RunConfig
from geojax.islands.actions import own_shares
from geojax.islands.island_plan import data_part, stage_parts
from geojax.islands.programs.site_part import SitePart
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.stage_lists import data_lists, hops_held, offer_limit_bytes, stage_lists
from geojax.pipeline.schedule import Schedule
from geojax.planner.memory import abstract_layouts, state_bytes, step_memory
from geojax.planner.memory_phases import StepMemory, StepPieces, phases_of_site
from geojax.planner.resolve.abstract_site import abstract_programs
from geojax.planner.resolve.choices import resolved_plan
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.planner.resolve.site_schedule import (
    bucket_layers,
    event_schedule,
    held_at_once,
    site_work,
)
from geojax.planner.resolve.traced_run import abstract_run_mesh
from geojax.planner.step_pieces import step_pieces
from geojax.step.program import batch_shape


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
    return memory_on(config, abstract_run_mesh(config))


def memory_on(config: RunConfig, mesh: Mesh) -> StepMemory:
    """Estimate the memory of one program on a mesh, whose devices need not exist.

    Raises:
        UserError: the layout cannot be.
    """
    plan = resolved_plan(config, mesh)
    layouts = abstract_layouts(config.model, plan, config.optimizer)
    batch = batch_shape(config.batch.global_batch_size, config.batch.sequence_length)
    return step_memory(config.model, plan, layouts, batch)


def island_memory(
    config: RunConfig, accelerator: Accelerator | None, site: int | None = None
) -> SiteMemory:
    """Estimate the memory of a site with its own runtime; arguments and errors as `run_memory`."""
    if config.dc.role == "data":
        programs = abstract_programs(config, data_part(config.model, bucket_layers(config)))
        held = held_at_once(config, programs, accelerator)
        activations = held * programs.step_bytes.of_microbatch
        memory = _site_memory(programs, _pieces(config, programs), activations)
        return SiteMemory(memory, programs, held)
    schedule, staged = event_schedule(config), chosen_layers(config)
    assert staged is not None, "sites in role stage are stages of a pipeline"
    lists, parts = stage_lists(config, schedule), stage_parts(config.model, staged)
    stages = range(len(parts))
    if site is not None:
        stages = stages[site * config.mesh.stage :][: config.mesh.stage]
    found = []
    pieces: StepPieces | None = None
    for stage in _unlike_stages(schedule, parts, stages):
        programs = abstract_programs(config, parts[stage])
        layers = [0] * schedule.placement.chunks
        for chunk, own in parts[stage].chunks.items():
            layers[chunk] = len(own)
        layer = programs.layer_bytes
        layer = layer if schedule.split_backward else layer.without_split
        activations = schedule.most_held(layers, layer)[stage]
        pieces = pieces or _pieces(config, programs)
        memory = _site_memory(programs, pieces, activations, hops_held(lists, stage))
        found.append(SiteMemory(memory, programs, schedule.in_flight[stage]))
    return max(found, key=lambda each: each.memory.bytes)


def _pieces(config: RunConfig, programs: SitePrograms) -> StepPieces:
    """Trace the pieces of the whole model's step, as a site computes them."""
    own = config.of_one_stage.batch
    batch = batch_shape(own.global_batch_size, own.sequence_length)
    return step_pieces(config.model, programs.plan, batch)


def _site_memory(
    programs: SitePrograms, pieces: StepPieces, activations: int, hops: int = 0
) -> StepMemory:
    """Estimate the memory of a site with a runtime of its own, or of a stage of it.

    Args:
        programs: the site's, or the stage's.
        pieces: those of the model.
        activations: bytes that microbatches hold at once between their forwards and backwards.
        hops: messages from and to other stages that are held at once.
    """
    step, part = programs.step_bytes, programs.part
    held = {
        "gathered weights": step.weights + step.of_pass,
        "gradients": step.gradients,
        "communication": step.messages + hops * (programs.hop_bytes if hops else 0),
    }
    phases = phases_of_site(
        held, activations, pieces, has_embedding=part.has_embedding, has_head=part.has_head
    )
    return StepMemory.of(state_bytes(programs.layouts), phases)


def offered_bytes(config: RunConfig) -> int:
    """Return the bytes that a device may have offered to one other site, or stage, at a time.

    Raises:
        UserError: the layout cannot be.
    """
    staged = chosen_layers(config)
    if staged is None:
        work = site_work(config, None)
        lists = data_lists(work, own_shares(config.mesh.dc), config.batch.microbatches)
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
