"""Times by which a run of a layout chooses its ticks and its order of work.

A run knows FLOPs, peaks and links (`geojax.planner.resolve.pipeline_plan`), and no calibration: a
plan asks the same of the same, so that it times the table that will run.
"""

from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.staged_model import StagedModel
from geojax.planner.cost.layout import LayoutCandidate
from geojax.precision import policy
from geojax.topology import Topology


def run_costs(
    model: ModelConfig,
    layout: LayoutCandidate,
    topology: Topology,
    sequence_length: int,
    placement: Placement,
    layers: tuple[int, ...],
) -> Costs:
    """Return the times of a microbatch in the chunks of a layout, as a run has them.

    Args:
        model: the model.
        layout: one of sites with as many stages each.
        topology: the sites.
        sequence_length: tokens of a sequence.
        placement: the stage of each chunk.
        layers: layers of each chunk.

    Returns:
        The times; where a peak or a link is not known, a forward and each half of a backward last
        as long, and hops take no time.
    """
    if layout.dc_role == "data":  # a pipeline in each site
        topology = topology.model_copy(update={"sites": topology.sites[:1], "links": ()})
    try:
        return StagedModel(
            model,
            topology,
            layout.stages_per_site[0],
            sequences=layout.microbatch_size,
            sequence_length=sequence_length,
            data=layout.data * layout.expert,
            parallelism=layout.parallelism,
            dtype=policy(layout.precision).compute_dtype.name,
            remat=layout.remat,
            given_layers=layers,
        ).costs(placement)
    except UserError:
        return Costs.uniform(placement.chunks, 1.0, 1.0, 1.0)
