"""Sections of a layout: the mesh, the state sharded over it, the batch, and its gradients."""

import math
from typing import Annotated, Literal

import pydantic

from geojax.data.batch_ramp import BatchRamp
from geojax.layout_names import WireName
from geojax.models.parallel.parallelism import ContextMethod
from geojax.quantities import Bytes, Count, Length
from geojax.settings import AUTO, NUMBER, UNLESS_AUTO, Settings

_MOST_DEVICES = 2**17
_MOST_SIZES = 2**8


class MeshSettings(Settings):
    """Sizes of the mesh axes; their product is the number of devices."""

    dc: Count = 1
    """Sites. With `dc.role: data` each site trains on its own share of the batch, and gradients are
    summed across the link."""

    stage: Count = 1
    """Pipeline stages inside a site."""

    data: Count = 1
    """Data-parallel ranks inside a site; the training state is sharded over them."""

    expert: Count = 1
    """Ranks inside a site that share the experts (expert parallelism). For all other weights, and
    for a dense model, they are data-parallel ranks."""

    context: Count = 1
    """Ranks that share one sequence (context parallelism)."""

    tensor: Count = 1
    """Ranks that share one layer (tensor parallelism)."""

    @property
    def devices(self) -> int:
        """Number of devices that the mesh needs."""
        return math.prod(self.model_dump().values())

    @pydantic.model_validator(mode="after")
    def _devices_can_be_listed(self) -> "MeshSettings":
        if self.devices > _MOST_DEVICES:
            product = " x ".join(f"{axis}={size}" for axis, size in self if size > 1)
            raise ValueError(
                f"{product} makes {self.devices:,} devices; up to {_MOST_DEVICES:,} would do"
            )
        return self


class ParallelismSettings(Settings):
    """Sequence and context parallelism of the ranks of `tensor` and `context`."""

    sequence: bool = False
    """Sequence parallelism: the ranks of `tensor` shard the sequence between the matmuls. They send
    the same bytes and hold 1/tensor of those activations."""

    chunks: Annotated[Annotated[Count, NUMBER] | AUTO, UNLESS_AUTO] = "auto"
    """With `sequence`: parts of a rank's positions that enter and leave the matmuls of `tensor` one
    after another, so that one travels while another is multiplied. "auto": on GPUs of a topology
    as many as the cost model finds fastest, if they save 1% of a step; elsewhere 1."""

    context_method: ContextMethod = "ring"
    """Context parallelism of attention: "ring", "all_gather" or "ulysses"."""


class ZeroSettings(Settings):
    """ZeRO (FSDP): state that is sharded over the data-parallel ranks inside a site."""

    stage: Literal[0, 1, 2, 3] = 1
    """Sharded state. 0: none. 1: master weights and optimizer state. 2: gradients too, reduced
    layer by layer. 3: the weights in the compute dtype too, gathered layer by layer."""

    across_sites: bool = False
    """Shard master weights and optimizer state over the sites as well, which saves memory. After
    the update, weights in the compute dtype cross the link instead of summed gradients."""

    reshard_after_forward: bool = True
    """Stage 3: free the gathered weights after the forward pass, and gather them again for the
    backward pass. false: keep them; with `dc.join: islands` for all microbatches of a step."""

    @pydantic.model_validator(mode="after")
    def _stage_allows_the_rest(self) -> "ZeroSettings":
        if self.across_sites and self.stage == 0:
            raise ValueError(
                "across_sites requires stage=1, 2 or 3; got 0. Remove across_sites, or set stage"
            )
        if not self.reshard_after_forward and self.stage != 3:
            raise ValueError(
                f"reshard_after_forward=false requires stage=3; got {self.stage}. Remove "
                "reshard_after_forward, or set stage"
            )
        return self


class RampSettings(Settings):
    """Growth of the global batch at a run's beginning: Megatron-LM's `--rampup-batch-size`."""

    start: Count
    """Sequences of the first step."""

    increment: Count
    """Sequences by which the batch grows at a time; a whole number of them leads from `start` to
    `global_batch_size`."""

    sequences: Annotated[int, pydantic.Field(gt=0, le=10**12)]
    """Sequences in which the batch grows from `start` to `global_batch_size`, in equal shares for
    each increment."""


class BatchSettings(Settings):
    """The global batch of one step; the same on every mesh."""

    global_batch_size: Count
    """Sequences in one step, over all sites."""

    sequence_length: Length
    """Tokens in a sequence."""

    microbatches: Count = 1
    """Microbatches of each data-parallel rank, or pipeline, before gradients are reduced (gradient
    accumulation). A pipeline allows at most 8,192, and 131,072 divided by its chunks."""

    ramp: RampSettings | None = None
    """Smaller batches at the run's beginning (see docs/data.md). Their microbatches are fewer, and
    as long. null: all batches have `global_batch_size` sequences."""

    @property
    def sizes(self) -> BatchRamp:
        """The size of each step's batch."""
        full, ramp = self.global_batch_size, self.ramp
        if ramp is None:
            return BatchRamp.constant(full)
        return BatchRamp(full, ramp.start, ramp.increment, ramp.sequences)

    def microbatches_of(self, sequences: int) -> int:
        """Return the microbatches of a batch of so many sequences, the full one or a smaller."""
        return sequences * self.microbatches // self.global_batch_size

    def sequences_of(self, microbatches: int) -> int:
        """Return the sequences of a batch of so many microbatches."""
        return self.global_batch_size // self.microbatches * microbatches

    @pydantic.model_validator(mode="after")
    def _ramp_leads_to_the_batch(self) -> "BatchSettings":
        ramp, full = self.ramp, self.global_batch_size
        if ramp is None or full % self.microbatches:  # the layout says what would divide
            return self
        given = f"ramp from {ramp.start} sequences by {ramp.increment}"
        if self.microbatches == 1:
            raise ValueError(
                f"{given} requires batch.microbatches of 2 or more: their number grows, and their "
                "sequences stay. Raise batch.microbatches, or remove ramp"
            )
        share, growth = full // self.microbatches, full - ramp.start
        is_whole = ramp.start % share == ramp.increment % share == growth % ramp.increment == 0
        if growth <= 0 or not is_whole:
            increment = min(max(round(ramp.increment / share), 1) * share, full - share)
            count = max(min(round(growth / increment), (full - share) // increment), 1)
            raise ValueError(
                f"{given} does not lead to global_batch_size={full} in whole microbatches of "
                f"{share} sequences; from {full - count * increment} by {increment} would"
            )
        if (count := growth // ramp.increment) > _MOST_SIZES:
            raise ValueError(
                f"{given} has {count} sizes before global_batch_size={full}, and each is a program "
                f"of its own; up to {_MOST_SIZES} would work, with a larger increment"
            )
        return self


class CommunicationSettings(Settings):
    """Reduction of the gradients: buckets, compression and overlap."""

    bucket_bytes: Annotated[Annotated[Bytes | None, NUMBER] | AUTO, UNLESS_AUTO] = "auto"
    """Most bytes of a bucket: gradients that are reduced as one message. While one bucket crosses
    the link, the next is reduced inside the site. "auto": at least ten bandwidth-delay products of
    a device's share of the topology's link, within a tenth of its memory. Without a topology:
    16777216. null: a bucket per leaf."""

    gradient_compression: WireName = "none"
    """Format of gradients on the link. "none": the dtype of the reduction, at least fp32. "bf16":
    half the bytes. "int8": blocks with a scale each, a little more than a quarter of the bytes.
    int8 has error feedback, which adds the rounding error to the next step's gradient. Sites stay
    bit-identical."""

    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Reduce the gradients of a bucket of layers during the backward pass of the layers before.
    Each bucket is then one message, whatever `bucket_bytes`. With pipeline stages inside the sites,
    a bucket is the head, or chunks with `bucket_layers`, and leaves after its last backward; more
    `virtual_stages` hide more. false: reduce all gradients after the backward pass. "auto": true
    where the topology predicts less exposed time on the link; false without a topology."""

    bucket_layers: Annotated[Annotated[Count, NUMBER] | AUTO, UNLESS_AUTO] = "auto"
    """With `overlap_grad_reduce`: layers of a bucket. Their backward pass should last longer than a
    message takes between sites. "auto": as many layers as this time and a tenth of the memory
    allow, by the topology; 1 without one. With pipeline stages inside the sites: layers of a stage,
    in whole chunks and at least one. "auto": those that expose least."""

    overlap_scatter: bool | Literal["auto"] = "auto"
    """With `overlap_grad_reduce` and pipeline stages inside the sites: sum a bucket in its site
    while the stages compute and the bucket before crosses the link. It then crosses one bucket
    later. false: the stages wait for the sum in the site, and the bucket crosses next. "auto": what
    exposes less, on GPUs; otherwise false."""

    overlap_param_gather: bool | Literal["auto"] = "auto"
    """With several `virtual_stages` and `zero.stage: 1`: gather the weights of a stage's next chunk
    while the stages compute with those before. false: gather all before the first forward. "auto":
    true on GPUs where it can be."""
