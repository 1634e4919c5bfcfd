"""The plan of a step: a layout on a mesh, and what became of its choices there."""

import dataclasses
import math
import sys

from jax.sharding import Mesh, PartitionSpec

from geojax.collectives import WireFormat
from geojax.config.layout import Layout
from geojax.config.layout_sections import CommunicationSettings
from geojax.config.pipeline_settings import PipelineSettings
from geojax.mesh import AXES
from geojax.models.parallel.parallelism import Parallelism
from geojax.pipeline.execution.cliques import cliques_agree
from geojax.pipeline.execution.late_chunks import ticks_between_chunks
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import Backend, LinearMatmul, LossScaleSettings, Policy
from geojax.runtime.platform import GPU, platform_of
from geojax.runtime.xla_flags import (
    CUSTOM_PRODUCTS_OPTIONS,
    FP8_OPTIONS,
    JOINT_TICKS_OPTIONS,
    MULTI_STREAM_OPTIONS,
    ONE_CLIQUE_OPTIONS,
    UNROLLED_OPTIONS,
)
from geojax.sharding import SHARD_AXES
from geojax.step.stage_layers import StagedLayers

BATCH_AXES = ("dc", *SHARD_AXES)
"""The axes over which the sequences of a batch are sharded; without `dc` where sites are stages."""

SIGNALS = ("stop", "save")
"""Requests that any process may make of all of them; summed over the mesh inside the step."""


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A mesh and the way in which a step uses it."""

    mesh: Mesh
    """The mesh, with all six axes."""

    policy: Policy
    """Dtypes of the weights, the compute and the reduction."""

    layout: Layout
    """The choices of the run; the fields below are what became of them on this mesh."""

    bucket_bytes: int | None = None
    """Most bytes of one message of the gradient reduction; None: one message a leaf."""

    wire_format: WireFormat | None = None
    """Format of gradients on the link between sites; None: the reduction dtype."""

    loss_scale: LossScaleSettings = dataclasses.field(default_factory=LossScaleSettings)
    """Settings of the loss scale, for a policy that has one."""

    attention: str = "auto"
    """Implementation of attention."""

    fp8_backend: Backend = "reference"
    """Backend of FP8 matrix products, for a policy that has a recipe."""

    grouped_matmul: bool = False
    """The model has experts, whose matrix products are custom calls on Hopper GPUs."""

    share_amax_across_dc: bool = False
    """Delayed scaling: keep one amax history for all sites instead of one a site.

    Without it no amax crosses `dc`. Other recipes have nothing to share: the tokens of another site
    are another tensor to them, and the weights are the same at all sites."""

    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket of layers while the backward pass of the layers before them
    runs, instead of all of them after it."""

    bucket_layers: int = 1
    """With `overlap_grad_reduce`: layers of a bucket, which travels during the backward pass of as
    many layers. More layers hide a longer round trip. It divides the model's layers. In a pipeline
    it counts layers of a stage, in whole chunks and at least one."""

    overlap_scatter: bool = False
    """With `overlap_grad_reduce` in a pipeline: sum a bucket in the site beside ticks, and send it
    to other sites when the next one is whole."""

    islands: int = 1
    """Sites with a runtime each that train together, the mesh being one of them; 1: the mesh holds
    all sites."""

    goes_on: bool = False
    """The islands go on without one that is lost."""

    most_shares: int = 1
    """Most shares of the batch that an island comes to compute while another one takes part."""

    staged_layers: StagedLayers | None = None
    """Assignment of layers to pipeline stages; None: there is no pipeline."""

    tick_program: TickProgram | None = None
    """Actions of the pipeline's stages, tick by tick."""

    def __post_init__(self) -> None:
        if self.staged_layers:
            stages = math.prod(self.mesh.shape[axis] for axis in self.stage_axes)
            needed = self.staged_layers.placement.stages
            assert stages == needed, (
                f"the axes {self.stage_axes} must have {needed} ranks, not {stages}"
            )

    @property
    def stages(self) -> StagedLayers:
        """The `staged_layers` of a pipeline."""
        assert self.staged_layers is not None, "a pipeline must have stages"
        return self.staged_layers

    @property
    def program(self) -> TickProgram:
        """The `tick_program` of a pipeline."""
        assert self.tick_program is not None, "a pipeline must have a table of ticks"
        return self.tick_program

    def makes_program_of(self, other: "StepPlan") -> bool:
        """Return True if both plans make the same program.

        Buckets and the pipeline may be asked for in other words and become the same.
        """
        if self.overlap_param_gather != other.overlap_param_gather:
            return False

        def resolved(plan: StepPlan) -> StepPlan:
            layout = plan.layout.model_copy(
                update={"communication": CommunicationSettings(), "pipeline": PipelineSettings()}
            )
            return dataclasses.replace(plan, layout=layout, tick_program=None)

        ticks = [plan.tick_program and plan.tick_program.ticks for plan in (self, other)]
        return ticks[0] == ticks[1] and resolved(self) == resolved(other)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes that number the stages of a pipeline; none without one."""
        if self.staged_layers is None:
            return ()
        return ("dc", "stage") if self.layout.dc.role == "stage" else ("stage",)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which the sequences of a batch are sharded."""
        return tuple(axis for axis in BATCH_AXES if axis not in self.stage_axes)

    @property
    def inter_axes(self) -> tuple[str, ...]:
        """The axes between sites over which gradients are summed: `dc`, unless sites are stages."""
        return tuple(axis for axis in ("dc",) if axis in self.batch_axes)

    @property
    def keeps_error_feedback(self) -> bool:
        """True if rounding errors of gradients on the link are added to the next gradients."""
        has_feedback = self.wire_format is not None and self.wire_format.needs_error_feedback
        return has_feedback and self.mesh.shape["dc"] * self.islands > 1

    @property
    def gathers_layer_by_layer(self) -> bool:
        """True if every pass gathers the weights of its layers anew (ZeRO 3)."""
        zero = self.layout.zero
        return zero.stage == 3 and zero.reshard_after_forward

    @property
    def overlap_param_gather(self) -> bool:
        """True if a stage's weights are gathered chunk by chunk, beside the first ticks."""
        late = self.layout.communication.overlap_param_gather is True
        if not late or self.tick_program is None or self.tick_program.branch_free:
            return False
        return ticks_between_chunks(self.tick_program.ticks) > 0

    @property
    def scans_layers(self) -> bool:
        """True if the step loops over layers; False if its program holds each of them by itself."""
        return self.layout.scan_layers is not False

    @property
    def parallelism(self) -> Parallelism:
        """The sharding of model and sequences on the mesh."""
        return self.layout.model_parallelism

    @property
    def matmul(self) -> LinearMatmul:
        """The matrix products of linear layers."""
        return LinearMatmul(self.policy.recipe, self.fp8_backend)

    @property
    def compiler_options(self) -> dict[str, str | bool] | None:
        """The options that programs are compiled with, in addition to the process's XLA flags."""
        by_backend = {"xla": FP8_OPTIONS, "transformer_engine": CUSTOM_PRODUCTS_OPTIONS}
        options = by_backend.get(self.fp8_backend, {})
        if self.grouped_matmul and platform_of(self.mesh) is GPU:
            options = options | CUSTOM_PRODUCTS_OPTIONS
        if not self.scans_layers and platform_of(self.mesh) is GPU:
            options = options | UNROLLED_OPTIONS
        if self._has_two_phases_beside_compute:
            options = options | MULTI_STREAM_OPTIONS
        if self.tick_program is not None and platform_of(self.mesh) is GPU:
            stages = math.prod(self.mesh.shape[axis] for axis in self.stage_axes)
            if not cliques_agree(self.tick_program.channels, stages):
                options = options | ONE_CLIQUE_OPTIONS
            if self.tick_program.joint:
                options = options | JOINT_TICKS_OPTIONS
        return options or None

    @property
    def _has_two_phases_beside_compute(self) -> bool:
        """True if buckets are summed inside and between sites while others go backwards, on GPUs.

        With ZeRO 3 the gathers of the next layers' weights share a group with the in-site phase, so
        that on streams of their own XLA would let the compute wait for them. A pipeline's parts and
        gathers of weights have streams without it.
        """
        overlaps = self.overlap_grad_reduce and self.layout.zero.stage < 3
        crosses = self.mesh.shape["dc"] > 1 and bool(self.inter_axes)
        on_gpus = platform_of(self.mesh) is GPU
        return overlaps and crosses and on_gpus and not self.staged_layers

    @property
    def one_message(self) -> "StepPlan":
        """The same plan with one bucket for leaves that are reduced together, whatever its size."""
        return dataclasses.replace(self, bucket_bytes=sys.maxsize)

    @property
    def sequence_spec(self) -> PartitionSpec:
        """The sharding of arrays [B]."""
        return PartitionSpec(self.batch_axes)

    @property
    def signal_spec(self) -> PartitionSpec:
        """The sharding of signals [ranks, len(SIGNALS)]: each rank has an entry of its own.

        Ranks that shared an entry could belong to processes with different requests."""
        return PartitionSpec(AXES)

    @property
    def token_spec(self) -> PartitionSpec:
        """The sharding of arrays [B, S]."""
        if self.mesh.shape["context"] == 1:
            return self.sequence_spec
        return PartitionSpec(self.batch_axes, "context")
