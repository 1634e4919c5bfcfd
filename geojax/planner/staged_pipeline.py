"""A pipeline whose chunks may lie on its stages in any way: what each chunk and each hop costs."""

import dataclasses
import functools

from geojax.errors import UserError
from geojax.models import AnyModel
from geojax.pipeline.schedule import Placement
from geojax.pipeline.simulation.costs import Costs
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.chunks import ChunkWork, SitePieces, placed_work, site_pieces
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import utilization_of
from geojax.precision import policy
from geojax.topology import Topology

_NOMINAL_PEAK = 1e9
"""FLOP/s of an accelerator without a published peak, where only the proportions of work matter."""


@dataclasses.dataclass(frozen=True)
class StagedPipeline:
    """One pipeline through all sites of a topology, by the cost model."""

    model: AnyModel
    layout: LayoutCandidate
    """Its stages and microbatches; `pipeline.layers` are those of placements of so many chunks, and
    others are balanced by time."""
    topology: Topology
    calibration: Calibration = dataclasses.field(default_factory=Calibration)
    """Shares that accelerators and networks reach of their published rates."""
    stage_seconds: float | None = None
    """If it was measured: forward and backward of a microbatch on the slowest stage, with one chunk
    a stage. Peaks then matter only where sites differ."""

    def __post_init__(self) -> None:
        stages, devices = self.layout.mesh.stage, self.layout.devices_per_stage
        for site in self.topology.sites:
            if stages * devices > site.accelerators:
                raise UserError(
                    f"{stages} stages of {devices} devices each need {stages * devices} "
                    f"accelerators, and site '{site.name}' of topology '{self.topology.name}' has "
                    f"{site.accelerators}"
                )

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.layout.pipeline_stages

    @property
    def site_of(self) -> tuple[str, ...]:
        """The name of each stage's site."""
        return tuple(self.topology.site_names[site] for site in self.layout.site_of_stages)

    @property
    def hop_bytes(self) -> float:
        """The bytes that all ranks of a stage send to the next one for a microbatch."""
        return self.layout.devices_per_stage * self._sites[0].hop_bytes

    def tokens_per_second(self, seconds: float) -> float:
        """Return the rate of a pipeline whose microbatches take so long together."""
        batch = self.layout.batch
        return batch.global_batch_size * batch.sequence_length / seconds

    def model_flops_utilization(self, seconds: float) -> float | None:
        """Return the MFU if its microbatches take so long together; None: a peak is unknown."""
        return utilization_of(self.model, self.layout, self.topology, seconds)

    def layers(self, placement: Placement) -> tuple[int, ...]:
        """Return the layers of each chunk; errors as `costs`."""
        return self._work(placement).layers

    def costs(self, placement: Placement) -> Costs:
        """Return the times of a microbatch with its chunks on the stages of `placement`.

        Raises:
            UserError: there are more chunks than layers, a site's peak is unknown, or the topology
                says nothing of a link that the pipeline crosses.
        """
        costs = self._work(placement).costs
        if self.stage_seconds is None:
            return costs
        plain = self._work(Placement.linear(self.stages)).costs
        return costs.scaled(self.stage_seconds / max(plain.work))

    @property
    def _dtype(self) -> str:
        return policy(self.layout.precision).compute_dtype.name

    @functools.cached_property
    def _sites(self) -> tuple[SitePieces, ...]:
        topology, kinds = self.topology, {site.accelerator.name for site in self.topology.sites}
        unknown = [site for site in topology.sites if site.accelerator.peak(self._dtype) is None]
        if unknown and self.calibration.stage_times is None:
            if self.stage_seconds is None or len(kinds) > 1:
                raise UserError(
                    f"the {self._dtype} peak of accelerator '{unknown[0].accelerator.name}' of "
                    f"site '{unknown[0].name}' is unknown. Name another accelerator (--accelerator "
                    "h100-sxm), or give a stage's measured time (--stage-seconds 20ms)"
                )
            topology = _with_peak(topology, self._dtype)
        return site_pieces(self.model, self.layout, topology, self.calibration, GEOJAX)

    def _work(self, placement: Placement) -> ChunkWork:
        layers = self.layout.pipeline.layers
        if layers is not None and len(layers) != placement.chunks:
            layers = None
        return placed_work(self.model, self.layout, self.topology, self._sites, placement, layers)


def _with_peak(topology: Topology, dtype: str) -> Topology:
    """Return the topology with accelerators of the nominal peak."""
    peaks = {"peak_flops_per_second": {dtype: _NOMINAL_PEAK}}
    sites = tuple(
        site.model_copy(update={"accelerator": site.accelerator.model_copy(update=peaks)})
        for site in topology.sites
    )
    return topology.model_copy(update={"sites": sites})
