"""The programs of a site with its own runtime on a mesh without devices; none is compiled."""

from collections.abc import Iterable

from geojax.islands.programs import SitePrograms
from geojax.islands.site_part import SitePart
from geojax.islands.site_state import site_layouts
from geojax.optim import learning_rate_schedule, make_optimizer
from geojax.pipeline.schedule import LayerBytes
from geojax.step.program import batch_shape
from geojax.train.config import RunConfig
from geojax.train.island_plan import island_plan, stage_config
from geojax.train.traced_run import abstract_run_mesh


def abstract_programs(config: RunConfig, part: SitePart) -> SitePrograms:
    """Make the programs of a stage of a site.

    Raises:
        UserError: the layout cannot be.
    """
    own = stage_config(config)
    plan = island_plan(config, abstract_run_mesh(config, own.mesh))
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    layouts = site_layouts(part, optimizer, plan)
    batch = batch_shape(own.batch.global_batch_size, own.batch.sequence_length)
    return SitePrograms(part, plan, layouts, optimizer, schedule, batch)


def most_layer_bytes(config: RunConfig, parts: Iterable[SitePart]) -> LayerBytes:
    """Return the bytes that a layer holds of a microbatch, the most of all stages.

    Args:
        config: the run of all sites, which all of them find the same for.
        parts: of each stage.

    Raises:
        UserError: the layout cannot be.
    """
    unlike = {
        (*map(len, part.chunks.values()), part.has_embedding, part.has_head): part for part in parts
    }
    found = [abstract_programs(config, part).layer_bytes for part in unlike.values()]
    return LayerBytes(*map(max, zip(*found, strict=True)))
