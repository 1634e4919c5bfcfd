"""How a step runs on a mesh: everything that shapes the program but not its result."""

import dataclasses
import math
import sys
from typing import Literal, TypeAlias

from jax.sharding import Mesh, PartitionSpec

from geojax.collectives import WireFormat
from geojax.mesh import AXES
from geojax.models.parallel.parallelism import ContextMethod, Parallelism
from geojax.models.transformer import Remat
from geojax.optim import SHARD_AXES
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import Backend, LinearMatmul, LossScaleSettings, Policy
from geojax.runtime.xla_flags import CUSTOM_PRODUCTS_OPTIONS, FP8_OPTIONS
from geojax.step.stage_layers import StagedLayers

BATCH_AXES = ("dc", *SHARD_AXES)
"""The axes over which the rows of a batch are spread; where sites are stages, the last of them."""

SIGNALS = ("stop", "save")
"""Requests that any process may make of all of them; summed over the mesh inside the step."""

DcRole: TypeAlias = Literal["data", "stage"]
"""What sites are to each other: "data", each trains on its share of the batch; "stage", each holds
a part of the pipeline."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A mesh and what is done on it."""

    mesh: Mesh
    """The mesh, with all six axes."""

    policy: Policy
    """Dtypes of the weights, the compute and the reduction."""

    microbatches: int = 1
    """Microbatches per step on each device."""

    bucket_bytes: int | None = None
    """Most bytes of one message of the gradient reduction; None: one message a leaf."""

    wire_format: WireFormat | None = None
    """The format of gradients on the link between sites; None, as they are reduced."""

    loss_scale: LossScaleSettings = dataclasses.field(default_factory=LossScaleSettings)
    """How the loss scale moves, under a policy that has one."""

    remat: Remat = "none"
    """What a layer's forward pass keeps for its backward pass."""

    attention: str = "auto"
    """Implementation of the attention seam."""

    fp8_backend: Backend = "reference"
    """Who multiplies FP8 numbers, under a policy that has a recipe."""

    share_amax_across_dc: bool = False
    """Whether sites have one history of delayed scaling together; otherwise each has its own, and
    nothing that FP8 knows of a tensor crosses `dc`. (Other recipes share none: the rows of another
    site are another tensor to them, and the weights are the same at all sites.)"""

    sequence_parallel: bool = False
    """Whether the ranks of `tensor` share the sequence between the matrix products."""

    context_method: ContextMethod = "ring"
    """How attention sees a sequence that the ranks of `context` share."""

    zero_stage: int = 1
    """What is sharded over (data, expert): 0, nothing; 1, master weights and optimizer state; 2,
    gradients too; 3, the weights that are computed with too, but for the layer at hand."""

    shard_across_sites: bool = False
    """Whether master weights and optimizer state are sharded over `dc` as well."""

    reshard_after_forward: bool = True
    """ZeRO 3: free the gathered weights after the forward pass and gather them again for the
    backward pass."""

    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket of layers while the backward pass of the layers before them
    runs, instead of all of them after it."""

    bucket_layers: int = 1
    """With `overlap_grad_reduce`: layers whose gradients travel together, while the backward pass
    of as many layers runs. The more, the longer may a round trip between sites be that is hidden.
    It divides the model's layers."""

    dc_role: DcRole = "data"
    """What sites are to each other."""

    staged_layers: StagedLayers | None = None
    """How pipeline stages share the layers; None: there is no pipeline."""

    tick_program: TickProgram | None = None
    """What the stages of the pipeline do, tick by tick."""

    def __post_init__(self) -> None:
        assert self.staged_layers or self.dc_role == "data", "sites are stages of no pipeline"
        if self.staged_layers:
            stages = math.prod(self.mesh.shape[axis] for axis in self.stage_axes)
            held = self.staged_layers.placement.stages
            assert stages == held, f"{held} stages, and {stages} along {self.stage_axes}"
        assert not (self.shard_across_sites and self.dc_role == "stage"), "sites hold other layers"
        if self.wire_format is not None:
            assert self.dc_role == "data", "between stages there is nothing to sum"
            assert not self.shard_across_sites, "a sum in a wire format is for all sites"
        assert not (self.share_amax_across_dc and self.dc_role == "stage"), (
            "nor do they share scales"
        )
        history = self.policy.recipe is not None and self.policy.recipe.history > 0
        assert history or not self.share_amax_across_dc, "scales are shared through a history"

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes that number the stages of a pipeline; none without one."""
        if self.staged_layers is None:
            return ()
        return ("dc", "stage") if self.dc_role == "stage" else ("stage",)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the rows of a batch are spread."""
        return tuple(axis for axis in BATCH_AXES if axis not in self.stage_axes)

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """The axes between sites over which gradients are summed: `dc`, unless it is of stages."""
        return tuple(axis for axis in ("dc",) if axis in self.batch_axes)

    @property
    def keeps_wire_errors(self) -> bool:
        """Whether what the wire format takes away from this step's gradients goes into the next."""
        has_feedback = self.wire_format is not None and self.wire_format.needs_error_feedback
        return has_feedback and self.mesh.shape["dc"] > 1

    @property
    def parallelism(self) -> Parallelism:
        """How the mesh spreads the model."""
        sizes = self.mesh.shape
        return Parallelism(
            tensor=sizes["tensor"],
            sequence=self.sequence_parallel and sizes["tensor"] > 1,
            context=sizes["context"],
            context_method=self.context_method,
            expert=sizes["expert"],
        )

    @property
    def matmul(self) -> LinearMatmul:
        """How linear layers multiply."""
        return LinearMatmul(self.policy.recipe, self.fp8_backend)

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """What the programs of this plan are compiled with, beside the flags of the process."""
        options = {"xla": FP8_OPTIONS, "transformer_engine": CUSTOM_PRODUCTS_OPTIONS}
        return options.get(self.fp8_backend)

    @property
    def one_message(self) -> "StepPlan":
        """The plan under which what is reduced together is one chunk, whatever its size."""
        return dataclasses.replace(self, bucket_bytes=sys.maxsize)

    @property
    def row_spec(self) -> PartitionSpec:
        """How things that have one entry a row lie on the mesh."""
        return PartitionSpec(self.batch_axes)

    @property
    def signal_spec(self) -> PartitionSpec:
        """How what the processes ask of each other lies on the mesh: one row for each rank. Ranks
        that shared a row could belong to processes that ask for different things."""
        return PartitionSpec(AXES)

    @property
    def token_spec(self) -> PartitionSpec:
        """How things that have one entry a token, [rows, sequence], lie on the mesh."""
        if self.mesh.shape["context"] == 1:
            return self.row_spec
        return PartitionSpec(self.batch_axes, "context")
