"""The memory that a device needs for a run: of one program, or of a site with its own runtime."""

from geojax.accelerators import Accelerator
from geojax.islands.programs import SitePrograms
from geojax.islands.site_state import site_layouts
from geojax.optim import learning_rate_schedule, make_optimizer
from geojax.planner.memory import StepMemory
from geojax.planner.site_memory import site_memory
from geojax.step.program import batch_shape
from geojax.train.config import RunConfig
from geojax.train.island_run import data_part, held_at_once, island_plan, stage_config
from geojax.train.traced_run import abstract_run_mesh, trace_run


def run_memory(config: RunConfig, accelerator: Accelerator | None) -> StepMemory:
    """Estimate the memory that a step of `config` takes on a device; none is touched.

    Args:
        config: the run of all sites.
        accelerator: the device; a site with its own runtime holds as many microbatches as it can.

    Raises:
        UserError: the layout cannot be.
    """
    if not has_data_sites(config):
        # A site that is a stage needs what that stage of one program does.
        return trace_run(config).memory()
    programs = abstract_site(config)
    return site_memory(programs, held_at_once(config, programs, accelerator))


def has_data_sites(config: RunConfig) -> bool:
    """Return True if each site has a runtime of its own and the whole model."""
    return config.dc.join == "islands" and config.dc.role == "data"


def abstract_site(config: RunConfig) -> SitePrograms:
    """Make the programs of a site in role data on a mesh without devices; none is compiled.

    Raises:
        UserError: the layout cannot be.
    """
    own = stage_config(config)
    plan = island_plan(config, abstract_run_mesh(config, own.mesh))
    part = data_part(config)
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    layouts = site_layouts(part, optimizer, plan)
    batch = batch_shape(own.batch.global_batch_size, own.batch.sequence_length)
    return SitePrograms(part, plan, layouts, optimizer, schedule, batch)
