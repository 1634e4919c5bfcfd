"""The walks of a run's stages in one process of a site."""

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from geojax.config.run_config import RunConfig
from geojax.islands.actions import fetched_ahead
from geojax.islands.island_plan import (
    island_plan,
    own_stages,
    site_parts,
    site_programs,
    stage_meshes,
)
from geojax.islands.site_walks import SiteWalks
from geojax.islands.stage_lists import action_lists
from geojax.islands.walk import Walk
from geojax.step.plan import StepPlan
from geojax.step.resolved import Step
from geojax.transport import Transport


def walks_of_run(
    config: RunConfig,
    resolved: Step,
    plan: StepPlan,
    transports: Sequence[Transport],
    before: Sequence[Walk | None],
) -> SiteWalks:
    """Make the walks of this process's stages; each goes on from the one before, if there is one.

    Args:
        config: the run of all sites.
        resolved: its choices, for the batch of `config`.
        plan: the step of the site.
        transports: joins each of the stages to those of other sites.
        before: walks over the same transports.
    """
    parts, lists = site_parts(config, resolved), action_lists(config, resolved)
    walks, meshes = [], stage_meshes(plan.mesh)
    for number, stage, last in zip(own_stages(plan.mesh), transports, before, strict=True):
        on_stage = dataclasses.replace(plan, mesh=meshes[number])
        programs = site_programs(config, parts[stage.site], on_stage)
        ahead = fetched_ahead(lists, stage.site)
        walks.append(Walk(lists[stage.site], ahead, programs, stage, last))
    return SiteWalks(walks, config.mesh.stage)


def walks_of_batch(
    config: RunConfig, resolved: Step, before: SiteWalks, mesh: Mesh, sequences: int
) -> SiteWalks:
    """Make the walks of batches of so many sequences, which go on from those of other batches."""
    step = resolved.of_batch(sequences)
    plan = island_plan(config, step.layout, mesh)
    transports = [walk.transport for walk in before.walks]
    return walks_of_run(config.of_batch(sequences), step, plan, transports, before.walks)
