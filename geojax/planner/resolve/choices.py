"""The plan of a run's step with every "auto" settled by its topology."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import AnyModel
from geojax.planner.buckets import CHOSEN
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.chunks import SitePieces, site_pieces
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.resolve.link_plan import with_buckets
from geojax.planner.resolve.pipeline_plan import choose_hop_ticks, within_memory
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.runtime.platform import GPU, Platform, platform_of
from geojax.step.config_plan import plan_of_layout
from geojax.step.plan import StepPlan
from geojax.step.resolved import with_layers
from geojax.step.stage_layers import gathers_beside_ticks

MOST_UNROLLED_LAYERS = 64
"""Layers above which a program loops over them: each takes 2 to 3 s to compile."""


def resolved_plan(config: RunConfig, mesh: Mesh) -> StepPlan:
    """Plan the step of `config` on `mesh`, whose devices need not exist.

    Raises:
        UserError: its pipeline cannot be, or its FP8 backend cannot run there.
    """
    config = config.changed(pipeline={"head": head_of_run(config, platform_of(mesh))})
    layout, staged, ticks = config.layout, chosen_layers(config), None
    if staged is not None:
        layout = with_layers(layout, staged.layers_per_chunk)
        ticks = choose_hop_ticks(config, staged).table
    layout = layout.changed(parallelism={"chunks": chunks_of_run(config, platform_of(mesh))})
    plan = plan_of_layout(config, layout, mesh, ticks)
    plan = with_buckets(config, within_memory(config, plan))
    layout = settled_layout(plan)
    scans = scans_layers(layout, config.model, platform_of(mesh))
    late = gathers_beside_ticks(layout, platform_of(mesh))
    layout = layout.changed(scan_layers=scans, communication={"overlap_param_gather": late})
    return dataclasses.replace(plan, layout=layout)


def chunks_of_run(config: RunConfig, platform: Platform) -> int:
    """Return the parts in which the streams of a run's layers enter and leave `tensor`.

    `platform` is that of its devices.
    """
    if config.parallelism.chunks != "auto":
        return config.parallelism.chunks
    pieces = _first_site(config, layout_of_run(config), platform)
    return 1 if pieces is None else pieces.tensor_chunks


def head_of_run(config: RunConfig, platform: Platform) -> str:
    """Return the `pipeline.head` of a run on devices of `platform`."""
    if config.pipeline.head != "auto":
        return config.pipeline.head
    pieces = _first_site(config, LayoutCandidate.of(config), platform)
    return "last_stage" if pieces is None else pieces.head


def _first_site(
    config: RunConfig, layout: LayoutCandidate, platform: Platform
) -> SitePieces | None:
    """Return the work of a layout of a run; None: not on GPUs, or a peak or a link is not known."""
    topology = config.load_topology()
    if topology is None or platform is not GPU:
        return None
    try:
        return site_pieces(config.model, layout, topology, Calibration(), GEOJAX)[0]
    except UserError:
        return None


def scans_layers(layout: Layout, model: AnyModel, platform: Platform) -> bool:
    """Return True if the step of a model loops over its layers on a platform.

    XLA for GPUs would send what a loop sends beside each layer after all of them.
    """
    if layout.scan_layers != "auto":
        return layout.scan_layers
    # With full remat a layer keeps so little that its stacks are small.
    gains = model.num_stacked_layers <= MOST_UNROLLED_LAYERS and layout.remat != "full"
    return not (gains and platform is GPU and layout.needs_layer_loops is None)


def settled_layout(plan: StepPlan) -> Layout:
    """Return the layout of a plan with the plan's buckets and ticks of hops in it."""
    buckets = {name: getattr(plan, name) for name in CHOSEN}
    ticks = plan.tick_program
    hops = 1 if ticks is None else max(ticks.ticks.hop_ticks, default=1)
    return settled(plan.layout, buckets, hops)


def settled(layout: Layout, buckets: Mapping[str, Any], hop_ticks: int) -> Layout:
    """Return a layout with these buckets, by the names of its settings, and ticks of hops."""
    return layout.changed(communication=buckets, pipeline={"hop_ticks": hop_ticks})
