"""The set-up of GeoPipe: 64 accelerators of 64 GB in three sites, TP 8, PP 8, Llama-2 13B and 70B.

Published are the accelerator, the sites, the parallelism and "up to about 9.1%" less time an
iteration than 1F1B. Distances, bandwidth and microbatches are not: distances are swept (1 ms of
round trip for each 100 km of fiber, over each of the two cuts), the others are assumed below.
"""

import dataclasses
import math

from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layout import LayoutCandidate, SiteShare
from geojax.planner.cost.memory import layout_memory
from geojax.planner.cost.predict import predict
from geojax.topology import Topology

PUBLISHED_GAIN = 0.091
MODELS = ("llama2-13b", "llama2-70b")
STAGES = (3, 3, 2)
SEQUENCE_LENGTH = 4096
MICROBATCHES = 32
TERABITS = 0.8
MEMORY_BYTES = 0.9 * 64e9
"""Memory of an Ascend 910B, a tenth of it left to the runtime."""
KILOMETERS = (0, 100, 200, 500, 1000, 1500, 2000)
SCHEDULES = ("geopipe", "latency_hiding", "latency_hiding_split")


def topology(kilometers: float, terabits: float = TERABITS) -> Topology:
    names = ("north", "center", "south")
    links = [
        {
            "sites": pair,
            "round_trip_seconds": kilometers * 1e-5,
            "bytes_per_second": terabits * 1e12 / 8,
        }
        for pair in (names[:2], names[1:])
    ]
    sites = [
        {
            "name": name,
            "hosts": hosts,
            "accelerators_per_host": 8,
            "accelerator": "ascend-910b",
        }
        for name, hosts in zip(names, STAGES, strict=True)
    ]
    return Topology.model_validate({"name": "three-sites", "sites": sites, "links": links})


@dataclasses.dataclass(frozen=True)
class ThreeSites:
    """Iterations of one model, stages working event by event."""

    model: ModelConfig
    calibration: Calibration

    def layout(self, schedule: str) -> LayoutCandidate:
        shares = tuple(SiteShare(stages, 1, MICROBATCHES) for stages in STAGES)
        layout = LayoutCandidate.made(
            sequence_length=SEQUENCE_LENGTH,
            microbatches=MICROBATCHES,
            mesh={"dc": 3, "stage": sum(STAGES) // 3, "tensor": 8},
            dc={"role": "stage"},
            parallelism={"sequence": True},
            remat="selective",
            pipeline={"schedule": schedule},
        ).with_shares(shares)
        if schedule == "1f1b":
            return layout
        return layout.changed(pipeline={"memory_limit": self.memory_limit(layout)})

    def memory_limit(self, layout: LayoutCandidate) -> int:
        """Return the most microbatches in flight that fit into the memory."""
        fitting = [
            limit
            for limit in range(1, MICROBATCHES + 1)
            if self._memory(layout.changed(pipeline={"memory_limit": limit})) <= MEMORY_BYTES
        ]
        return max(fitting, default=1)

    def seconds(
        self, schedule: str, kilometers: float, terabits: float = TERABITS, *, late: bool = False
    ) -> float:
        """Return the time of an iteration; `late`: of a framework that posts receives late."""
        return predict(
            self.model,
            self.layout(schedule),
            topology(kilometers, terabits),
            calibration=self.calibration,
            execution=dataclasses.replace(GEOJAX, lock_step=False, late_receives=late),
        ).step_seconds

    def gain(self, schedule: str, kilometers: float, *, late: bool = False) -> float:
        """Return the part of strict 1F1B's iteration that a schedule saves."""
        return 1 - self.seconds(schedule, kilometers) / self.seconds("1f1b", kilometers, late=late)

    def distance_of(self, gain: float, schedule: str) -> float:
        """Return the kilometers of a cut from which a schedule gains so much; inf: none do."""
        low, high = 0.0, 4000.0
        if self.gain(schedule, low) >= gain:
            return low
        if self.gain(schedule, high) < gain:
            return math.inf
        for _ in range(10):
            middle = (low + high) / 2
            low, high = (low, middle) if self.gain(schedule, middle) >= gain else (middle, high)
        return high

    def bandwidth_point(self, schedule: str, kilometers: float) -> float:
        """Return the Tbit/s beyond which an iteration gets no more than 2% shorter."""
        longest = 1.02 * self.seconds(schedule, kilometers, 100.0)
        low, high = 0.001, 100.0
        for _ in range(14):
            middle = math.sqrt(low * high)
            enough = self.seconds(schedule, kilometers, middle) <= longest
            low, high = (low, middle) if enough else (middle, high)
        return high

    def _memory(self, layout: LayoutCandidate) -> float:
        return layout_memory(self.model, layout).bytes
