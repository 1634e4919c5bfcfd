"""Rates that programs reach of what makers publish, and the timing habits of a framework's program.

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


@dataclasses.dataclass(frozen=True)
class Execution:
    """The habits of a framework's program that set its time and are in no layout."""

    name: str
    """Name of the framework."""
    attention_forward: Mapping[str, float]
    """Share of the 16-bit peak that the forward of fused attention reaches, by accelerator."""
    attention_backward: Mapping[str, float]
    """Share of the 16-bit peak that its backward reaches."""
    fused_attention: bool = True
    """Scores stay on the chip; otherwise each operation on them goes through memory, the whole
    square of them."""
    fused_projections: bool = False
    """Query, key and value are one matrix product; so are gate and up."""
    sums_in_matmul: bool = False
    """The products that make gradients of weights add to the sum over microbatches."""
    recomputes: frozenset[str] | None = None
    """Parts of a layer that the backward computes again ("attention", "elementwise", "up", "all");
    None: those of the layout's remat policy."""
    pipelined_tensor: bool = False
    """Collectives over `tensor` travel in `tensor` pieces beside the product that makes or needs
    them, so that one piece of each is exposed."""
    overlaps_gather: bool = False
    """Gathered weights travel beside the first forwards."""
    overlaps_reduction: bool = False
    """Gradients travel beside the last backwards, chunk by chunk."""
    lock_step: bool = False
    """Stages of a pipeline in one program wait for each other's ticks."""
    late_receives: bool = False
    """A stage posts the receive of a message between stages when it is free, and waits for all of
    its way (blocking point-to-point)."""
    reduced_itemsize: int | None = None
    """Bytes of a gradient in its reduction; None: those of the precision's policy."""


FLASH_ATTENTION_2 = {"a100-sxm-80gb": 0.62, "a100-sxm-40gb": 0.62, "h100-sxm": 0.35}
"""FlashAttention-2 (Dao 2023): 50 to 73% of an A100's peak; on an H100 35% (Shah et al. 2024,
"FlashAttention-3")."""

CUDNN_ATTENTION = {"a100-sxm-80gb": 0.62, "a100-sxm-40gb": 0.62, "b200-sxm": 0.5, "gb200": 0.5}
"""Forward of cuDNN's fused attention with causal masks and heads of 128 dims; those of an H100 and
its kin are `DEFAULT_ATTENTION_FORWARD`."""

DEFAULT_ATTENTION_FORWARD = 0.55
"""Causal, 4k to 8k positions, heads of 128 dims, cuDNN 9 on an H100 ("FlashAttention-3", figure 5:
500 to 600 of 989 TFLOP/s)."""

DEFAULT_ATTENTION_BACKWARD = 0.45
"""The same ("FlashAttention-3", figure 6: 400 to 500 TFLOP/s)."""

GEOJAX = Execution("geojax", CUDNN_ATTENTION, {}, lock_step=True)
"""The programs of geojax: attention by cuDNN, collectives over `tensor` in between two products
that need them, a tick of a pipeline as long as its busiest stage."""
