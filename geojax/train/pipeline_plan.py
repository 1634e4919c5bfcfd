"""The pipeline of a run, made of its settings: layers of each stage, and its ticks."""

from geojax.errors import UserError
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import TickTable
from geojax.pipeline.simulation.model_costs import layers_by_operations
from geojax.pipeline.tick_tables import hops_between_sites, tick_table
from geojax.runtime.platform import Platform
from geojax.step.stage_layers import StagedLayers
from geojax.train.config import RunConfig


def staged_layers(config: RunConfig) -> StagedLayers | None:
    """Return the layers and the stage of each chunk; None for a run without a pipeline."""
    settings, stages = config.pipeline, config.pipeline_stages
    if stages == 1:
        return None
    sites = [config.mesh.stage] * config.pipeline_sites
    placement = schedule_entry(settings.schedule).placement(sites, settings.virtual_stages)
    layers = settings.layers or layers_by_operations(
        config.model, config.batch.sequence_length, placement.chunks, config.remat
    )
    return StagedLayers(placement, layers)


def pipeline_ticks(config: RunConfig, staged: StagedLayers) -> TickTable:
    """Make the run's tick table, for the microbatches of `batch.microbatches`.

    Raises:
        UserError: the schedule cannot keep within the memory limit or take so many microbatches.
    """
    settings = config.pipeline
    placement = staged.placement
    hops = hops_between_sites(placement, config.mesh.stage, settings.hop_ticks)
    limit = settings.memory_limit
    if limit is not None:  # of whole microbatches; a table counts what each chunk holds
        limit *= settings.virtual_stages
    return tick_table(settings.schedule, placement, config.batch.microbatches, hops, limit)


def tick_program(config: RunConfig, staged: StagedLayers, platform: Platform) -> TickProgram:
    """Return the ticks of `pipeline_ticks` as a program.

    Raises:
        UserError: there is no such table, or devices of `platform` cannot run it.
    """
    table = pipeline_ticks(config, staged)
    branch_free = schedule_entry(config.pipeline.schedule).branch_free
    uneven = len(set(staged.layers_per_chunk)) > 1
    ring = config.mesh.context > 1 and config.parallelism.context_method == "ring"
    if not platform.permutes_by_group and ring and (uneven or not branch_free):
        raise UserError(
            "parallelism.context_method=ring sends messages that on CPUs all devices must take "
            "part in, and these stages do not all work at a time: choose all_gather or ulysses, or "
            "schedule branch_free with as many layers in every chunk"
        )
    return TickProgram.of(table, branch_free=branch_free)
