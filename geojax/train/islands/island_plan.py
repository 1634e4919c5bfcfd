"""The plan of one site whose runtime is its own: its config, mesh, chunks and held microbatches."""

import dataclasses
import itertools
import math
import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from geojax.accelerators import Accelerator
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.programs.site_part import SitePart, bucket_count, even_chunks
from geojax.islands.programs.site_programs import SitePrograms, StepBytes
from geojax.islands.site_state import site_layouts
from geojax.mesh import make_mesh
from geojax.optim import bytes_per_device, learning_rate_schedule, make_optimizer
from geojax.quantities import quantity
from geojax.runtime.device_memory import usable_memory
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape
from geojax.train.batches import sequences_of_process
from geojax.train.compiled_run import step_plan


def make_site_mesh(config: RunConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Make the mesh of one site of `config`, over the devices of its processes.

    Raises:
        UserError: the layout does not fit the devices.
    """
    return make_mesh(devices=devices, **config.mesh.model_dump() | {"dc": 1})


def island_plan(config: RunConfig, mesh: Mesh) -> StepPlan:
    """Plan the step of one site of `config` on its mesh; its stages differ in their devices alone.

    Raises:
        UserError: its FP8 backend cannot run there, or a process lies across its stages.
    """
    process_groups(mesh)
    plan = step_plan(config.of_one_stage, stage_meshes(mesh)[0])
    return dataclasses.replace(plan, mesh=mesh, islands=config.mesh.dc, overlap_grad_reduce=False)


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
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    layouts, own = site_layouts(part, optimizer, plan), config.of_one_stage.batch
    batch = batch_shape(own.global_batch_size, own.sequence_length)
    return SitePrograms(part, plan, layouts, optimizer, schedule, batch)


def data_part(config: RunConfig) -> SitePart:
    """Divide the model of a run in role data into the chunks that make its buckets."""
    count = bucket_count(config.model.num_stacked_layers, config.communication.bucket_layers)
    return SitePart(config.model, even_chunks(config.model, count))


def held_at_once(config: RunConfig, programs: SitePrograms, accelerator: Accelerator | None) -> int:
    """Return how many microbatches a site in role data holds at once; all if there is no limit.

    Args:
        config: the run of all sites.
        programs: the site's.
        accelerator: the kind of its devices; None: not known, as on CPUs.

    Raises:
        UserError: `pipeline.memory_limit_bytes` is too little for one.
    """
    held, bytes_held = config.pipeline.memory_limit, config.pipeline.memory_limit_bytes
    if bytes_held is not None:
        needed = programs.step_bytes.of_microbatch
        if needed > bytes_held:
            raise UserError(
                f"a site holds {quantity(needed, 'B')} of a microbatch where "
                f"pipeline.memory_limit_bytes is {quantity(bytes_held, 'B')}; "
                f"{quantity(needed, 'B')} would work"
            )
        held = min(held or sys.maxsize, bytes_held // needed)
    if held is None:
        usable = None if accelerator is None else usable_memory(accelerator, os.environ)
        free = None if usable is None else usable.bytes - bytes_per_device(programs.layouts)
        held = held_microbatches(programs.step_bytes, free)
    return min(held, programs.plan.layout.batch.microbatches)


def held_microbatches(step: StepBytes, free_bytes: int | None) -> int:
    """Return how many microbatches a step can hold at once, at least one.

    Args:
        step: the bytes of a step on each device.
        free_bytes: those that the state leaves free; None: not known, as on CPUs.
    """
    if free_bytes is None:
        return sys.maxsize
    compute = step.of_microbatch  # of a chunk under way, besides what it keeps: at most as much
    return max((free_bytes - step.always - compute) // step.of_microbatch, 1)
