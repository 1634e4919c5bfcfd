"""Timing habits of a framework's program, and those of geojax."""

import dataclasses
from collections.abc import Mapping


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
    sums_head: bool = False
    """The gradients of the head pass through memory once more for their sums over microbatches."""
    recomputes: frozenset[str] | None = None
    """Parts of a layer that the backward computes again ("attention", "elementwise", "up", "all");
    None: those of the layout's remat policy."""
    pipelined_tensor: bool = False
    """Collectives over `tensor` travel in `tensor` pieces beside the product that makes or needs
    them, so that one piece of each is exposed."""
    gradients_last: bool = False
    """The gradients of a region's weights are computed after that of its input, which meanwhile is
    scattered over `tensor`."""
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


CUDNN_ATTENTION = {"a100-sxm-80gb": 0.62, "a100-sxm-40gb": 0.62, "b200-sxm": 0.5, "gb200": 0.5}
"""Forward of cuDNN's fused attention with causal masks and heads of 128 dims; those of an H100 and
its kin are `DEFAULT_ATTENTION_FORWARD`."""

DEFAULT_ATTENTION_FORWARD = 0.55
"""Causal, 4k to 8k positions, heads of 128 dims, cuDNN 9 on an H100 ("FlashAttention-3", figure 5:
500 to 600 of 989 TFLOP/s)."""

DEFAULT_ATTENTION_BACKWARD = 0.45
"""The same ("FlashAttention-3", figure 6: 400 to 500 TFLOP/s)."""

GEOJAX = Execution(
    "geojax", CUDNN_ATTENTION, {}, sums_head=True, gradients_last=True, lock_step=True
)
"""The programs of geojax: attention by cuDNN, collectives over `tensor` in between two products
that need them, but for the scatters of gradients; a tick of a pipeline as long as its busiest
stage."""
