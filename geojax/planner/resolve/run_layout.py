"""The layout of a run as the cost model takes it, and as settings of a config."""

from typing import Any

from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.planner.buckets import CHOSEN
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.step.plan import StepPlan


def planned_layout(config: RunConfig, plan: StepPlan) -> LayoutCandidate:
    """Return the layout of `config` with the layers and buckets that its step `plan` has."""
    layers = plan.staged_layers.layers_per_chunk if plan.staged_layers else None
    buckets = {name: getattr(plan, name) for name in (*CHOSEN, "overlap_param_gather")}
    return LayoutCandidate.of(config).changed(
        pipeline={"layers": layers, "head": plan.layout.pipeline.head},
        communication=buckets,
        parallelism=plan.layout.parallelism,
    )


def layout_of_run(config: RunConfig) -> LayoutCandidate:
    """Return the layout of `config`, with its layers; what it leaves to "auto" stays so."""
    staged = chosen_layers(config)
    layers = None if staged is None else staged.layers_per_chunk
    return LayoutCandidate.of(config).changed(pipeline={"layers": layers})


def run_settings(layout: LayoutCandidate) -> dict[str, Any]:
    """Return the settings of a config that make its layout this one, of sites that are alike."""
    sections = set(Layout.model_fields) - ({"pipeline"} if layout.pipeline_stages == 1 else set())
    return layout.model_dump(mode="json", exclude_unset=True, include=sections)
