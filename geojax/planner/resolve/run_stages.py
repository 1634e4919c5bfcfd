"""The layers of each stage of a run."""

from geojax.config.run_config import RunConfig
from geojax.pipeline.simulation.model_costs import layers_by_operations
from geojax.step.stage_layers import StagedLayers, placement_of, staged_layers


def chosen_layers(config: RunConfig) -> StagedLayers | None:
    """Return the layers and the stage of each chunk; None for a run without a pipeline."""
    if config.pipeline_stages == 1 or config.pipeline.layers is not None:
        return staged_layers(config)
    placement = placement_of(config)
    layers = layers_by_operations(
        config.model, config.batch.sequence_length, placement.chunks, config.remat
    )
    return StagedLayers(placement, layers)
