"""Sites with runtimes of their own as the stages of one pipeline: their parts and their work."""

from collections.abc import Sequence

from geojax.islands.actions import SiteAction, forward_actions, stage_actions, windows
from geojax.islands.site_part import SitePart
from geojax.step.stage_layers import StagedLayers
from geojax.train.config import RunConfig
from geojax.train.pipeline_plan import choose_hop_ticks, staged_layers

Lists = Sequence[Sequence[SiteAction]]
"""The actions of each site."""


def stage_parts(config: RunConfig) -> list[SitePart]:
    """Return the part of each site: the layers of its stage as one program has them."""
    staged = _staged(config)
    ends = [sum(staged.layers_per_chunk[: chunk + 1]) for chunk in range(staged.placement.chunks)]
    layers = [
        range(end - count, end) for end, count in zip(ends, staged.layers_per_chunk, strict=True)
    ]
    return [
        SitePart(config.model, {chunk: layers[chunk] for chunk in staged.placement.chunks_of(site)})
        for site in range(config.mesh.dc)
    ]


def stage_lists(config: RunConfig) -> Lists:
    """List the actions of each site in a step, in the order of the config's schedule.

    Raises:
        UserError: the schedule cannot keep within the memory limit or take so many microbatches.
    """
    schedule = choose_hop_ticks(config, _staged(config)).table.schedule
    tied = config.model.tie_word_embeddings
    return [stage_actions(schedule, site, tied=tied) for site in range(config.mesh.dc)]


def validation_lists(config: RunConfig) -> Lists:
    """List the actions of each site in a validation."""
    placement, microbatches = _staged(config).placement, config.batch.microbatches
    return [forward_actions(placement, microbatches, site) for site in range(config.mesh.dc)]


def fetched_ahead(lists: Lists, site: int) -> dict[int, int]:
    """Return how many messages a site fetches ahead from each other site."""
    return {
        sender: count for (sender, receiver), count in windows(lists).items() if receiver == site
    }


def _staged(config: RunConfig) -> StagedLayers:
    staged = staged_layers(config)
    assert staged is not None, "sites in role stage are stages of a pipeline"
    return staged
