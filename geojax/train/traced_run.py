"""The step of a run before it has devices: traced, or lowered for those of this process."""

import jax

from geojax.accelerators import Accelerator
from geojax.mesh import make_mesh, require_sites
from geojax.optim import learning_rate_schedule, make_optimizer
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.memory import CompiledMemory, TracedStep
from geojax.runtime.xla_flags import expected_platform
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts
from geojax.topology import Topology
from geojax.train.compiled_run import step_plan
from geojax.train.config import RunConfig


def trace_run(config: RunConfig) -> TracedStep:
    """Trace the step of `config` on a mesh without devices; no device is touched.

    Raises:
        UserError: dc is not the number of the topology's sites, or the layout cannot be.
    """
    if config.topology is not None:
        require_sites(Topology.load(config.topology), config.mesh.dc)
    accelerator = None if config.simulate_devices is not None else accelerator_of_run(config)
    platform = "cpu"
    if config.simulate_devices is None and accelerator is None:
        platform = expected_platform()
    sizes = config.mesh.model_dump()
    plan = step_plan(config, abstract_mesh(sizes, platform=platform, accelerator=accelerator))
    return TracedStep.of(
        config.model,
        plan,
        make_optimizer(config.optimizer, config.steps),
        learning_rate_schedule(config.optimizer, config.steps),
        batch_shape(config.batch.global_batch_size, config.batch.sequence_length),
    )


def accelerator_of_run(config: RunConfig) -> Accelerator | None:
    """Return the accelerator of the topology of `config`, if it has one kind in all sites."""
    if config.topology is None:
        return None
    sites = Topology.load(config.topology).sites
    kinds = {site.accelerator.name: site.accelerator for site in sites}
    return next(iter(kinds.values())) if len(kinds) == 1 else None


def compiled_memory(config: RunConfig) -> CompiledMemory:
    """Compile the step of `config` for the first devices of this process and read its memory.

    Nothing is allocated. There must be as many devices as the config's mesh has places.
    """
    devices = jax.devices()[: config.mesh.devices]
    plan = step_plan(config, make_mesh(devices=devices, **config.mesh.model_dump()))
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    layouts = state_layouts(config.model, optimizer, plan)
    batch = batch_shape(config.batch.global_batch_size, config.batch.sequence_length)
    step = lower_step(layouts, config.model, plan, optimizer, schedule, batch)
    return CompiledMemory.of(step.compile(compiler_options=plan.compiler_options))
