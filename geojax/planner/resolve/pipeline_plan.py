"""The choices of a run's pipeline: layers of each stage, ticks of hops, and the order of work."""

import dataclasses
import functools
from typing import NamedTuple

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.pipeline.earlier_weights import within_bytes
from geojax.pipeline.schedule import LayerBytes, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step_seconds
from geojax.pipeline.tick_tables import hops_between_sites, near_or_delayed, tick_table
from geojax.planner.buckets import EXPOSED_LATENCY_LIMIT
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.chunks import chunk_work, site_pieces
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.planner.step_pieces import step_pieces
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape
from geojax.step.stage_layers import StagedLayers


class HopChoice(NamedTuple):
    """The ticks of hops between sites, and the costs that they were chosen by."""

    ticks: int
    table: TickTable
    costs: Costs | None
    """The times of a microbatch by FLOPs, peaks and links; None where some are not known."""


class HopExposure(NamedTuple):
    """The time of hops between sites that no compute hides."""

    seconds: float
    step_seconds: float
    """Time of the whole step."""


def choose_hop_ticks(
    config: RunConfig, staged: StagedLayers, limit: int | None = None
) -> HopChoice:
    """Choose the ticks of hops between sites, and make the run's tick table, which has them.

    Args:
        config: the run.
        staged: how its stages share the layers.
        limit: the most (microbatch, chunk) pairs that a stage may hold; None: as many as
            `pipeline.memory_limit` allows.

    Raises:
        UserError: the schedule cannot keep within the memory limit or take so many microbatches.
    """
    settings, placement = config.pipeline, staged.placement
    if limit is None and settings.memory_limit is not None:
        # Of whole microbatches; a table counts what each chunk holds.
        limit = settings.memory_limit * settings.virtual_stages
    try:
        costs = pipeline_costs(config)
    except UserError:
        costs = None

    def table(ticks: int) -> TickTable:
        hops = hops_between_sites(placement, config.mesh.stage, ticks)
        microbatches = config.batch.microbatches
        return tick_table(settings.schedule, placement, microbatches, hops, limit, costs=costs)

    if settings.hop_ticks != "auto":
        return HopChoice(settings.hop_ticks, table(settings.hop_ticks), costs)
    if costs is None:
        return HopChoice(1, table(1), costs)
    chosen = near_or_delayed(table, costs)
    return HopChoice(max(chosen.hop_ticks, default=1), chosen, costs)


def pipeline_costs(config: RunConfig) -> Costs:
    """Return the times of a microbatch in the run's pipeline, by the cost model.

    Raises:
        UserError: there is no topology, or it does not say enough.
    """
    return _costs(config, layout_of_run(config))


def costs_of_stages(config: RunConfig) -> Costs:
    """Return the times of a microbatch in the run's pipeline with one chunk a stage.

    Raises:
        UserError: there is no topology, or it does not say enough.
    """
    layout = layout_of_run(config)
    if layout.pipeline.virtual_stages > 1:
        layout = layout.changed(pipeline={"virtual_stages": 1, "layers": None, "schedule": "1f1b"})
    return _costs(config, layout)


@functools.lru_cache(maxsize=8)
def _costs(config: RunConfig, layout: LayoutCandidate) -> Costs:
    topology = config.load_topology()
    if topology is None:
        raise UserError("there is no topology")
    sites = site_pieces(config.model, layout, topology, Calibration(), GEOJAX)
    if layout.dc.role == "data":  # a pipeline in each site
        layout, sites = layout.of_site(0), sites[:1]
    return chunk_work(config.model, layout, topology, sites).costs


def hop_exposure(config: RunConfig, plan: StepPlan) -> HopExposure | None:
    """Predict what hops between sites cost a step; None where none cross or times are unknown."""
    if config.pipeline_sites == 1 or plan.staged_layers is None or plan.tick_program is None:
        return None
    try:
        costs = pipeline_costs(config)
    except UserError:
        return None
    return _hop_exposure(plan.tick_program.ticks, costs)


def _hop_exposure(table: TickTable, costs: Costs) -> HopExposure:
    seconds = lock_step_seconds(table, costs)
    return HopExposure(seconds - lock_step_seconds(table, costs.inside_sites), seconds)


def hop_lines(config: RunConfig, plan: StepPlan) -> list[str]:
    """Return what the log says of the hops between sites; none where none cross."""
    if config.pipeline_sites == 1 or plan.staged_layers is None or plan.tick_program is None:
        return []
    table = plan.tick_program.ticks
    how = " (auto)" if config.pipeline.hop_ticks == "auto" else ""
    line = f"pipeline over dc: hop_ticks {max(table.hop_ticks)}{how}"
    try:
        costs = pipeline_costs(config)
    except UserError as unknown:
        return [f"{line}; without times: {unknown.problem}"]
    exposed, seconds = _hop_exposure(table, costs)
    cut = max((hop for hop in costs.hops if hop.link is not None), key=lambda hop: hop.seconds)
    tick = max(costs.work)
    lines = [
        f"{line}: a hop takes {cut.seconds * 1e3:.3g} ms, {cut.latency * 1e3:.3g} of them latency, "
        f"a tick {tick * 1e3:.3g} ms; hops expose {exposed:.2g} s of a step's {seconds:.2g} s "
        f"({exposed / seconds:.1%}; by the cost model)"
    ]
    if exposed > EXPOSED_LATENCY_LIMIT * seconds:
        lines.append(
            f"warning: hops expose more than {EXPOSED_LATENCY_LIMIT:.0%} of a step; "
            + ("pipeline.hop_ticks auto, " if config.pipeline.hop_ticks == 1 else "")
            + "longer microbatches (fewer batch.microbatches) or more microbatches in flight "
            "(schedule geopipe or latency_hiding) would help"
        )
    return lines


def within_memory(config: RunConfig, plan: StepPlan) -> StepPlan:
    """Return `plan` with ticks in which stages hold no more bytes than they may.

    That is `pipeline.memory_limit_bytes`. Without it, gradients of weights that come in a second
    half of the backward are put off only in memory that the forwards need in any case.

    Raises:
        UserError: the schedule cannot keep within the limit.
    """
    limit, program = config.pipeline.memory_limit_bytes, plan.tick_program
    staged = plan.staged_layers
    if program is None or staged is None:
        return plan
    if limit is None and not program.ticks.schedule.split_backward:
        return plan
    batch = batch_shape(config.batch.global_batch_size, config.batch.sequence_length)
    layer = step_pieces(config.model, plan, batch).held
    table = _within_bytes(config, staged, program.ticks, layer)
    return dataclasses.replace(plan, tick_program=program.of_table(table))


def _within_bytes(
    config: RunConfig, staged: StagedLayers, table: TickTable, layer: LayerBytes
) -> TickTable:
    limit, layers = config.pipeline.memory_limit_bytes, staged.layers_per_chunk
    try:
        return within_bytes(table, layers, layer, limit=limit)
    except UserError as too_much:
        assert limit is not None, "without a limit there is a table"
        pairs = limit // (layer.before_backward * max(layers))
        try:  # a schedule that bends may have another table
            table = choose_hop_ticks(config, staged, max(1, pairs)).table
            return within_bytes(table, layers, layer, limit=limit)
        except UserError:
            raise too_much from None
