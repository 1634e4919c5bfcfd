"""The plan of a run's step with every "auto" settled by its topology."""

import dataclasses

from jax.sharding import Mesh

from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.planner.resolve.link_plan import with_buckets
from geojax.planner.resolve.pipeline_plan import choose_hop_ticks, within_memory
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.step.config_plan import plan_of_layout
from geojax.step.plan import StepPlan
from geojax.step.resolved import with_layers


def resolved_plan(config: RunConfig, mesh: Mesh) -> StepPlan:
    """Plan the step of `config` on `mesh`, whose devices need not exist.

    Raises:
        UserError: its pipeline cannot be, or its FP8 backend cannot run there.
    """
    layout, staged, ticks = config.layout, chosen_layers(config), None
    if staged is not None:
        layout = with_layers(layout, staged.layers_per_chunk)
        ticks = choose_hop_ticks(config, staged).table
    plan = plan_of_layout(config, layout, mesh, ticks)
    plan = with_buckets(config, within_memory(config, plan))
    return dataclasses.replace(plan, layout=settled_layout(plan))


def settled_layout(plan: StepPlan) -> Layout:
    """Return the layout of a plan with the plan's buckets and ticks of hops in it."""
    layout, ticks = plan.layout, plan.tick_program
    buckets = {
        "bucket_bytes": plan.bucket_bytes,
        "overlap_grad_reduce": plan.overlap_grad_reduce,
        "bucket_layers": plan.bucket_layers,
    }
    hops = {"hop_ticks": 1 if ticks is None else max(ticks.ticks.hop_ticks, default=1)}
    return layout.model_copy(
        update={
            "communication": layout.communication.model_copy(update=buckets),
            "pipeline": layout.pipeline.model_copy(update=hops),
        }
    )
