"""Rates that programs reach of what makers publish.

Defaults are documented per accelerator; figures of `geojax probe` take their place where there are
some.
"""

import dataclasses
from collections.abc import Mapping

from geojax.accelerators import CATALOG, Accelerator
from geojax.pipeline.simulation.stage_times import StageTimes

FITTED_EFFICIENCY = {
    ("a100-sxm-80gb", "bfloat16"): 0.741,
    ("h100-sxm", "bfloat16"): 0.617,
    ("h100-sxm", "float8"): 0.544,
}
"""Share of the peak that large matrix products reach, each fitted on one published step time by
`benchmarks/planner.py`. Peaks are at boost clocks, which no product of that size sustains."""

_LIKE = {
    "a100-sxm-40gb": "a100-sxm-80gb",
    "h100-pcie": "h100-sxm",
    "h100-nvl": "h100-sxm",
    "h200-sxm": "h100-sxm",
    "gh200": "h100-sxm",
    "b200-sxm": "h100-sxm",
    "gb200": "h100-sxm",
}
"""Accelerators of one make and of like power for their peak, to which a fitted share is lent."""

RELATIVE_ERROR = {
    ("a100-sxm-80gb", "bfloat16"): 0.044,
    ("h100-sxm", "bfloat16"): 0.086,
    ("h100-sxm", "float8"): 0.092,
}
"""Error of the step time that 90% of the published rows of an accelerator and precision keep
within, those of the fit left out (`benchmarks/planner.py`)."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Shares of published rates that a program reaches."""

    matmul_efficiency: Mapping[tuple[str, str], float] = dataclasses.field(
        default_factory=lambda: FITTED_EFFICIENCY
    )
    """Share of the peak that large matrix products reach, before the losses of their shape, by
    accelerator and precision of the factors ("bfloat16", "float8")."""
    other_matmul_efficiency: float = 0.6
    """The same for accelerators without a fitted share: that of the H100, rounded."""
    memory_efficiency: float = 0.85
    """Share of the memory bandwidth in elementwise operations; STREAM triad on A100 and H100
    reaches 0.85 to 0.93 of the data sheet's."""
    other_memory_efficiency: float = 0.85
    """The same for accelerators that are not in the catalog."""
    inside_host: float = 0.8
    """Share of NVLink that NCCL reaches in large messages, bus bandwidth by nccl-tests: 235 to 240
    of 300 GB/s on DGX A100, 360 to 370 of 450 GB/s on DGX H100 without NVLS."""
    between_hosts: float = 0.9
    """Share of the network cards that NCCL reaches in large messages: InfiniBand's headers and
    NCCL's protocol take the rest."""
    stage_times: StageTimes | None = None
    """Times of a layer, the embedding and the head as `geojax probe` measured them."""

    def matmul(self, accelerator: Accelerator, precision: str) -> float:
        """Return the share of the peak for large matrix products of a dtype's name."""
        name = _LIKE.get(accelerator.name, accelerator.name)
        return self.matmul_efficiency.get((name, precision), self.other_matmul_efficiency)

    def memory(self, accelerator: Accelerator) -> float:
        """Return the share of the memory bandwidth in elementwise operations."""
        if CATALOG.get(accelerator.name) == accelerator:
            return self.memory_efficiency
        return self.other_memory_efficiency


MEASURED = Calibration(
    other_matmul_efficiency=1.0, other_memory_efficiency=1.0, inside_host=1.0, between_hosts=1.0
)
"""For networks, and accelerators of which nothing is published, whose rates were measured."""
