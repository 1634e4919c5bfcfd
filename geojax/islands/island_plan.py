"""The plan of one site whose runtime is its own: its mesh, its stages, and its programs."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.actions import most_shares
from geojax.islands.programs.site_part import SitePart
from geojax.islands.programs.site_programs import SitePrograms
from geojax.islands.site_state import site_layouts
from geojax.mesh import make_mesh
from geojax.models import AnyModel, parameter_kinds
from geojax.optim import learning_rate_schedule, make_optimizer
from geojax.step.batches import sequences_of_process
from geojax.step.config_plan import plan_of_layout
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape
from geojax.step.resolved import Step
from geojax.step.stage_layers import StagedLayers, staged_layers


def make_site_mesh(config: RunConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Make the mesh of one site of `config`, over the devices of its processes.

    Raises:
        UserError: the layout does not fit the devices.
    """
    return make_mesh(devices=devices, **config.mesh.model_dump() | {"dc": 1})


def island_plan(config: RunConfig, layout: Layout, mesh: Mesh) -> StepPlan:
    """Plan the step of one site of `config` on its mesh; its stages differ in their devices alone.

    Args:
        config: the run of all sites.
        layout: its resolved layout.
        mesh: the site's devices, which need not exist.

    Raises:
        UserError: its FP8 backend cannot run there, or a process lies across its stages.
    """
    process_groups(mesh)
    plan = plan_of_layout(config, layout.of_one_stage, stage_meshes(mesh)[0])
    return dataclasses.replace(
        plan,
        mesh=mesh,
        islands=config.mesh.dc,
        goes_on=config.islands.goes_on,
        most_shares=most_shares(config.mesh.dc) if config.islands.keeps_batch else 1,
        overlap_grad_reduce=False,
    )


def stage_meshes(mesh: Mesh) -> list[Mesh]:
    """Divide the devices of a site into those of its stages; a single one may have no devices."""
    if mesh.shape["stage"] == 1:
        return [mesh]
    dim = mesh.axis_names.index("stage")
    return [
        Mesh(np.take(mesh.devices, [stage], dim), mesh.axis_names, axis_types=mesh.axis_types)
        for stage in range(mesh.shape["stage"])
    ]


def own_stages(mesh: Mesh) -> list[int]:
    """List the stages of a site of which this process holds devices, by their numbers in it."""
    own = jax.process_index()
    return [stage for stage, processes in enumerate(_processes(mesh)) if own in processes]


def process_groups(mesh: Mesh) -> int:
    """Return the number of groups of a site's processes that hold the same stages.

    It is the number of stages where each has processes of its own, and else of processes.

    Raises:
        UserError: a process holds a part of one stage and something of another, or processes are
            not numbered in the order of the stages.
    """
    stages = mesh.shape["stage"]
    if stages == 1:
        return 1
    groups = dict.fromkeys(_processes(mesh))
    processes = [process for group in groups for process in group]
    count = len(set(processes))
    if len(processes) > count:
        raise UserError(
            f"dc.join=islands with mesh.stage={stages} requires a number of processes in each site "
            f"that divides {stages} or is a multiple of it; got {count}. Start "
            f"{math.gcd(stages, count)} or {math.lcm(stages, count)}, or change mesh.stage"
        )
    for earlier, later in itertools.pairwise(processes):
        if earlier > later:
            raise UserError(
                f"dc.join=islands with mesh.stage={stages} requires processes that are numbered "
                f"host by host; process {earlier} is on a host before that of process {later}. "
                "Number those of a host one after the other (srun --distribution=block)"
            )
    return len(groups)


def _processes(mesh: Mesh) -> list[tuple[int, ...]]:
    """List the processes that hold the devices of each stage of a site, in the mesh's order."""
    of_stages = np.moveaxis(mesh.devices, mesh.axis_names.index("stage"), 0)
    return [tuple(dict.fromkeys(each.process_index for each in own.flat)) for own in of_stages]


def sequences_of_site(config: RunConfig, plan: StepPlan, site: int) -> list[int]:
    """List the sequences of a global batch that the devices of this process need, ascending."""
    count = config.of_one_stage.batch.global_batch_size
    first = site * count if config.dc.role == "data" else 0
    return [first + each for each in sequences_of_process(plan, count)]


def site_programs(config: RunConfig, part: SitePart, plan: StepPlan) -> SitePrograms:
    """Make the programs of a stage of a site; none is compiled.

    Args:
        config: the run of all sites.
        part: what the stage holds of the model.
        plan: its step, on its own mesh.
    """
    optimizer = make_optimizer(config.optimizer, config.steps, parameter_kinds(config.model))
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    layouts, own = site_layouts(part, optimizer, plan), config.of_one_stage.batch
    batch = batch_shape(own.global_batch_size, own.sequence_length)
    return SitePrograms(part, plan, layouts, optimizer, schedule, batch)


def data_part(model: AnyModel, layers: Sequence[int]) -> SitePart:
    """Return the whole model in chunks of so many layers, each a bucket, as in role data."""
    return SitePart(model, dict(enumerate(consecutive(layers))))


def stage_parts(model: AnyModel, staged: StagedLayers) -> list[SitePart]:
    """Return the part of each stage: the layers that it has in one program."""
    layers = consecutive(staged.layers_per_chunk)
    return [
        SitePart(model, {chunk: layers[chunk] for chunk in staged.placement.chunks_of(stage)})
        for stage in range(staged.placement.stages)
    ]


def site_parts(config: RunConfig, step: Step) -> list[SitePart]:
    """Return the part of each site in role data, or of each stage."""
    if step.sites:
        return [data_part(config.model, work.layers) for work in step.sites]
    staged = staged_layers(step.layout)
    assert staged is not None, "sites in role stage are stages of a pipeline"
    return stage_parts(config.model, staged)


def consecutive(counts: Sequence[int]) -> list[range]:
    """Return the numbers of the layers of each chunk: 0 and 1, and 2 to 4, for counts 2 and 3."""
    ends = itertools.accumulate(counts)
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
