"""The link between the sites of a run: the buckets that suit it, and the log's lines about it."""

from typing import NamedTuple

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.buckets import (
    CHOSEN,
    ComputeTimes,
    Exposure,
    LinkShare,
    choose_buckets,
    exposure_lines,
    link_share,
    predict_exposure,
)
from geojax.planner.resolve.pipeline_plan import hop_lines
from geojax.planner.resolve.run_prediction import compute_times_of_run
from geojax.quantities import quantity
from geojax.step.config_plan import DEFAULT_BUCKET_BYTES
from geojax.step.plan import StepPlan


class _RunLink(NamedTuple):
    """A device's share of the link, and what a device can do meanwhile."""

    share: LinkShare
    times: ComputeTimes | None
    memory_bytes: int | None


def with_buckets(config: RunConfig, plan: StepPlan) -> StepPlan:
    """Return `plan` with the buckets of `config.communication`, "auto" replaced by a choice."""
    link = _run_link(config, plan)
    if link is None:
        return plan
    return choose_buckets(config.model, plan, *link, _auto(config)).plan


def gradient_exposure(
    config: RunConfig, plan: StepPlan
) -> tuple[Exposure, ComputeTimes | None] | None:
    """Predict what the messages of the gradients cost a step beyond its compute.

    Returns:
        The exposure and, where they are known, the times of the step; None where no gradients
        cross a link, or where it is not described.
    """
    link = _run_link(config, plan)
    if link is None:
        return None
    return predict_exposure(config.model, plan, link.share, link.times), link.times


def link_lines(config: RunConfig, plan: StepPlan) -> list[str]:
    """Return what the log says of the messages between sites; nothing with one site."""
    return [*_bucket_lines(config, plan), *hop_lines(config, plan)]


def _bucket_lines(config: RunConfig, plan: StepPlan) -> list[str]:
    if plan.mesh.shape["dc"] == 1 or not plan.inter_axes:
        return []
    auto = _auto(config)
    link = _run_link(config, plan)
    if link is None:
        buckets = quantity(DEFAULT_BUCKET_BYTES, "B")
        why = "without a topology that describes the links between sites, auto is"
        return [f"gradients over dc: {why} buckets of {buckets} and no overlap"] if auto else []
    exposure = predict_exposure(config.model, plan, link.share, link.times)
    return exposure_lines(exposure, plan, link.share, link.times, auto=auto)


def _auto(config: RunConfig) -> list[str]:
    return [name for name in CHOSEN if getattr(config.communication, name) == "auto"]


def _run_link(config: RunConfig, plan: StepPlan) -> _RunLink | None:
    """Return the link that gradients cross; None where none do, or where it is not described."""
    sites = plan.mesh.shape["dc"]
    topology = config.load_topology()
    if topology is None or sites == 1 or not plan.inter_axes:
        return None
    share = link_share(topology, plan.mesh.size // sites)
    if share is None:
        return None
    if config.simulate_devices is not None:  # of the link alone something is known
        return _RunLink(share, None, None)
    memory = [site.accelerator.memory_bytes for site in topology.sites]
    return _RunLink(
        share,
        _compute_times(config),
        min(int(size) for size in memory if size) if all(memory) else None,
    )


def _compute_times(config: RunConfig) -> ComputeTimes | None:
    """Predict the work that messages may travel beside; None: a peak or a link is not known."""
    try:
        return compute_times_of_run(config)
    except UserError:
        return None
