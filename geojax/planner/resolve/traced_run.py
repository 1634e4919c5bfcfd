"""The step of a run before it has devices: traced, or compiled ahead of time."""

from jax.sharding import Mesh

from geojax.accelerators import Accelerator
from geojax.config.layout_sections import MeshSettings
from geojax.config.run_config import RunConfig
from geojax.mesh import require_sites
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.compile_target import CompileTarget
from geojax.planner.compiled_step import CompiledStep
from geojax.planner.memory import TracedStep
from geojax.planner.resolve.choices import resolved_plan
from geojax.runtime.xla_flags import expected_platform
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape


def trace_run(config: RunConfig) -> TracedStep:
    """Trace the step of `config` on a mesh without devices; no device is touched.

    Raises:
        UserError: dc is not the number of the topology's sites, or the layout cannot be.
    """
    return trace_on(config, abstract_run_mesh(config))


def abstract_run_mesh(config: RunConfig, axes: MeshSettings | None = None) -> Mesh:
    """Return the mesh of `config` without devices.

    Args:
        config: the run.
        axes: those of a part of the mesh; None: all of it.

    Raises:
        UserError: dc is not the number of the topology's sites.
    """
    accelerator = None
    topology = config.load_topology()
    if topology is not None:
        require_sites(topology, config.mesh.dc)
        # Where sites have several kinds, their platform is what matters here.
        accelerator = topology.sites[0].accelerator
    platform = "cpu"
    if config.simulate_devices is not None:
        accelerator = None
    elif accelerator is None:
        platform = expected_platform()
    sizes = (axes or config.mesh).model_dump()
    return abstract_mesh(sizes, platform=platform, accelerator=accelerator)


def trace_on(config: RunConfig, mesh: Mesh) -> TracedStep:
    """Trace the step of `config` on `mesh`, whose devices need not exist.

    Raises:
        UserError: the layout cannot be.
    """
    return trace_plan(config, resolved_plan(config, mesh))


def trace_plan(config: RunConfig, plan: StepPlan) -> TracedStep:
    """Trace the step of `config` as `plan` has it."""
    return TracedStep.of(
        config.model,
        plan,
        config.optimizer,
        config.steps,
        batch_shape(config.batch.global_batch_size, config.batch.sequence_length),
    )


def accelerator_of_run(config: RunConfig) -> Accelerator | None:
    """Return the accelerator of the topology of `config`, if it has one kind in all sites."""
    topology = config.load_topology()
    if topology is None:
        return None
    kinds = {site.accelerator.name: site.accelerator for site in topology.sites}
    return next(iter(kinds.values())) if len(kinds) == 1 else None


def compile_run(config: RunConfig, target: CompileTarget) -> CompiledStep:
    """Compile the step of `config` ahead of time for `target`; nothing is allocated.

    Raises:
        UserError: the layout cannot be, or does not fit the target or the topology.
    """
    mesh = target.mesh(config.mesh.model_dump(), config.load_topology())
    return CompiledStep.of(trace_on(config, mesh))
