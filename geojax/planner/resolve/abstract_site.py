"""The programs of a site with its own runtime on a mesh without devices; none is compiled."""

from collections.abc import Iterable

from geojax.config.run_config import RunConfig
from geojax.islands.island_plan import island_plan, site_programs
from geojax.islands.programs.site_part import SitePart
from geojax.islands.programs.site_programs import SitePrograms
from geojax.pipeline.schedule import LayerBytes
from geojax.planner.resolve.traced_run import abstract_run_mesh


def abstract_programs(config: RunConfig, part: SitePart) -> SitePrograms:
    """Make the programs of a stage of a site.

    Raises:
        UserError: the layout cannot be.
    """
    mesh = abstract_run_mesh(config, config.of_one_stage.mesh)
    return site_programs(config, part, island_plan(config, config.layout, mesh))


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
