"""Nemotron-4 340B on two sites of 1,536 H100 at 21 ms, beside one site with all of them.

NVIDIA published 96% of one site's throughput and 49% MFU; the bandwidth of its link, and what its
program overlaps, it did not.
"""

import dataclasses
import math

from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.cost.prediction import Prediction
from geojax.topology import Topology

SEQUENCE_LENGTH = 4096
PUBLISHED_EFFICIENCY, PUBLISHED_MFU = 0.96, 0.49
TERABITS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8)
MEMORY_BYTES = 80e9

_COMMON = LayoutCandidate.made(
    sequence_length=SEQUENCE_LENGTH,
    microbatches=72,
    mesh={"stage": 12, "data": 32, "tensor": 8},
    parallelism={"sequence": True},
    remat="selective",
)
ONE_SITE = {
    "interleaved": _COMMON.changed(pipeline={"schedule": "interleaved", "virtual_stages": 8}),
    "zero_bubble_h1": _COMMON.changed(pipeline={"schedule": "zero_bubble_h1"}),
    "branch_free": _COMMON.changed(pipeline={"schedule": "branch_free"}),
}
"""NVIDIA's layout, 9.4 million tokens a step, in the schedules that one program can run."""


def two_site_layouts() -> dict[str, LayoutCandidate]:
    """Return the layouts of both roles by name, each in the schedule that suits one site best."""
    replicas = ONE_SITE["interleaved"].changed(mesh={"dc": 2, "data": 16})
    layouts = {
        f"data, {compression}": replicas.changed(
            communication={"gradient_compression": compression}
        )
        for compression in ("none", "bf16", "int8")
    }
    for schedule, layout in ONE_SITE.items():
        layouts[f"stage, {schedule}"] = layout.changed(
            mesh={"dc": 2, "stage": layout.mesh.stage // 2}, dc={"role": "stage"}
        )
    return layouts


@dataclasses.dataclass(frozen=True)
class TwoSites:
    """Predictions on the topology with a link of any bandwidth."""

    model: ModelConfig
    topology: Topology
    calibration: Calibration

    @classmethod
    def load(cls, calibration: Calibration) -> "TwoSites":
        topology = Topology.load("two-h100-sites")
        return cls(ModelConfig.load("nemotron4-340b"), topology, calibration)

    def one_site(self) -> Prediction:
        """Return the fastest step of one site with all GPUs."""
        site = self.topology.sites[0]
        site = site.model_copy(update={"hosts": 2 * site.hosts})
        whole = self.topology.model_copy(update={"sites": (site,), "links": ()})
        return min(
            (self._predict(layout, whole) for layout in ONE_SITE.values()),
            key=lambda made: made.step_seconds,
        )

    def step(self, layout: LayoutCandidate, terabits: float) -> Prediction:
        """Return the step of a layout with so many Tbit/s between the sites."""
        rate = {"bytes_per_second": terabits * 1e12 / 8}
        links = tuple(link.model_copy(update=rate) for link in self.topology.links)
        return self._predict(layout, self.topology.model_copy(update={"links": links}))

    def needed(self, layout: LayoutCandidate, seconds: float) -> float:
        """Return the Tbit/s with which a step takes so long; inf where none is enough."""
        low, high = 0.05, 100.0
        if self.step(layout, high).step_seconds > seconds:
            return math.inf
        for _ in range(12):
            middle = math.sqrt(low * high)
            enough = self.step(layout, middle).step_seconds <= seconds
            low, high = (low, middle) if enough else (middle, high)
        return high

    def _predict(self, layout: LayoutCandidate, topology: Topology) -> Prediction:
        return predict(
            self.model,
            layout,
            topology,
            calibration=self.calibration,
        )
