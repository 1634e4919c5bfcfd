"""The layers of each stage of a run."""

import functools

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.model_costs import layers_by_operations
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.staged_pipeline import StagedPipeline
from geojax.step.stage_layers import StagedLayers, placement_of, staged_layers


@functools.lru_cache(maxsize=16)
def chosen_layers(config: RunConfig) -> StagedLayers | None:
    """Return the layers and the stage of each chunk; None for a run without a pipeline.

    Where the config has no layers, stages take about as long by the cost model. By operations,
    where there is no topology or nothing is known of its accelerators.
    """
    if config.pipeline_stages == 1 or config.pipeline.layers is not None:
        return staged_layers(config)
    placement = placement_of(config)
    try:
        layers = _layers_by_time(config, placement)
    except UserError:
        layers = layers_by_operations(
            config.model, config.batch.sequence_length, placement.chunks, config.remat
        )
    return staged_layers(config.changed(pipeline={"layers": layers}))


def _layers_by_time(config: RunConfig, placement: Placement) -> tuple[int, ...]:
    """Return the layers with which the slowest stage is fastest.

    Raises:
        UserError: there is no topology, or nothing is known of its accelerators.
    """
    topology = config.load_topology()
    if topology is None:
        raise UserError("there is no topology")
    layout = LayoutCandidate.of(config)
    if config.dc.role == "data":  # a pipeline in each site, here the first
        topology = topology.model_copy(update={"sites": topology.sites[:1], "links": ()})
        size = layout.microbatch_size
        layout = layout.changed(mesh={"dc": 1}).with_microbatches(layout.batch.microbatches, size)
    return StagedPipeline(config.model, layout, topology, Calibration()).layers(placement)
