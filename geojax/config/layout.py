"""A layout: everything that may be chosen about a run of a given model, batch and topology."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import pydantic

from geojax.config.layout_sections import (
    BatchSettings,
    CommunicationSettings,
    MeshSettings,
    ParallelismSettings,
    ZeroSettings,
)
from geojax.config.pipeline_settings import (
    DcSettings,
    PipelineSettings,
    check_ramp_scheduled,
    check_scheduled,
    check_stages,
)
from geojax.layout_names import PrecisionName
from geojax.models import AnyModel
from geojax.models.chunk.remat import Remat
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import Parallelism
from geojax.precision import policy
from geojax.settings import Settings
from geojax.suggestions import listed


class Layout(Settings):
    """A run's mesh and the way in which a step uses it."""

    mesh: MeshSettings = MeshSettings()
    """Sizes of the mesh axes."""

    parallelism: ParallelismSettings = ParallelismSettings()
    """Sequence and context parallelism."""

    dc: DcSettings = DcSettings()
    """Role of the sites."""

    pipeline: PipelineSettings = PipelineSettings()
    """Schedule and chunks of pipeline stages."""

    zero: ZeroSettings = ZeroSettings()
    """State sharded over data-parallel ranks."""

    batch: BatchSettings
    """The global batch."""

    precision: PrecisionName = "bf16"
    """Dtype in which weights are gathered and multiplied. Master weights are at least fp32. The
    "fp8-" recipes use FP8 for the matmuls of linear layers and bf16 elsewhere."""

    remat: Remat = "none"
    """Rematerialization: activations that the backward pass computes again. none: no activations.
    selective: all but the results of matmuls. full: all inside a layer."""

    scan_layers: bool | Literal["auto"] = "auto"
    """Loop over the layers. false: the program holds each layer by itself, takes less time and
    memory and four times as long to compile. "auto": false on GPUs for at most 64 layers without
    full remat, where it can be: in programs that send nothing while layers are computed
    (data-parallel ranks with ZeRO 0 or 1 and without overlap_grad_reduce; stages of islands)."""

    communication: CommunicationSettings = CommunicationSettings()
    """Buckets and compression of the gradients."""

    @property
    def model_parallelism(self) -> Parallelism:
        """Sharding of model and sequences on the mesh."""
        sequence, chunks = self.parallelism.sequence and self.mesh.tensor > 1, 1
        if sequence and self.parallelism.chunks != "auto":
            chunks = self.parallelism.chunks
        return Parallelism(
            tensor=self.mesh.tensor,
            sequence=sequence,
            chunks=chunks,
            context=self.mesh.context,
            context_method=self.parallelism.context_method,
            expert=self.mesh.expert,
            vocabulary_stages=self.mesh.stage if self.shares_vocabulary else 1,
        )

    @property
    def pipeline_sites(self) -> int:
        """The number of sites that one pipeline runs through."""
        return self.mesh.dc if self.dc.role == "stage" else 1

    @property
    def pipeline_stages(self) -> int:
        """The number of stages of one pipeline; 1 where there is none."""
        return self.pipeline_sites * self.mesh.stage

    @property
    def head_shares(self) -> int:
        """Stages that share the head, its positions or its vocabulary; 1: the last one has all."""
        return self.mesh.stage if self.pipeline.head in ("positions", "vocabulary") else 1

    @property
    def shares_vocabulary(self) -> bool:
        """True if the stages of a pipeline share the tables of tokens and the head's kernel."""
        return self.pipeline.head == "vocabulary"

    @property
    def of_one_stage(self) -> Self:
        """One stage of a site by itself, with the batch that it gets.

        In role data a site is one stage and gets its share, in role stage every stage gets all.
        """
        shares = self.mesh.dc if self.dc.role == "data" else 1
        sequences = self.batch.global_batch_size // shares
        batch = {"global_batch_size": sequences, "ramp": None}
        return self.changed(mesh={"dc": 1, "stage": 1}, batch=batch)

    def of_batch(self, sequences: int) -> Self:
        """Return the layout of a step of so many sequences: a size of the ramp, or all."""
        batch = {
            "global_batch_size": sequences,
            "microbatches": self.batch.microbatches_of(sequences),
            "ramp": None,
        }
        return self.changed(batch=batch)

    def changed(self, **sections: Any) -> Self:
        """Return it with other settings, which nothing validates.

        Args:
            sections: by the name of a section, those of its settings that change, or a new value.
        """
        update = {
            name: getattr(self, name).model_copy(update=new) if isinstance(new, Mapping) else new
            for name, new in sections.items()
        }
        return self.model_copy(update=update)

    @pydantic.model_validator(mode="after")
    def _chunks_can_be(self) -> Self:
        chunks = self.parallelism.chunks
        if chunks in ("auto", 1):
            return self
        if not (self.parallelism.sequence and self.mesh.tensor > 1):
            raise ValueError(
                f"parallelism.chunks={chunks} requires parallelism.sequence and mesh.tensor of 2 "
                "or more. Set both, or remove chunks"
            )
        recipe = policy(self.precision).recipe
        if recipe is not None and recipe.activation.along is not None:
            raise ValueError(
                f"parallelism.chunks={chunks} requires a precision whose scales are of whole "
                f"tensors; {self.precision} has some of blocks of tokens. Set fp8-current or "
                "fp8-delayed, or remove chunks"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _stages_can_be(self) -> Self:
        if self.dc.role == "stage" and self.zero.across_sites:
            raise ValueError(
                "zero.across_sites requires dc.role=data: with dc.role=stage the sites hold "
                "different layers. Remove zero.across_sites"
            )
        shared = self.pipeline.head in ("positions", "vocabulary")
        if shared and (self.mesh.stage == 1 or self.dc.join == "islands"):
            raise ValueError(
                f"pipeline.head={self.pipeline.head} requires mesh.stage of 2 or more and "
                "dc.join=one_program: stages of one program share it. Set them, or remove head"
            )
        if self.shares_vocabulary and self.dc.role == "stage":
            raise ValueError(
                "pipeline.head=vocabulary requires dc.role=data: with dc.role=stage the first site "
                "embeds tokens and the last one has the head. Set head to positions"
            )
        if self.pipeline_stages == 1:
            return self
        chunks = self.pipeline_stages * self.pipeline.virtual_stages
        check_scheduled(chunks, self.batch.microbatches)
        check_ramp_scheduled(chunks, self.batch)
        if self.zero.stage > 1:
            raise ValueError(
                f"zero.stage={self.zero.stage} requires one pipeline stage: with more it would "
                "send the gradients (and weights) of a microbatch in every tick. Set zero.stage to "
                "0 or 1"
            )
        if self.communication.overlap_grad_reduce is True and self.dc.role == "stage":
            raise ValueError(
                "communication.overlap_grad_reduce requires dc.role=data where there are pipeline "
                "stages: with dc.role=stage the sites sum no gradients. Remove overlap_grad_reduce"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _weights_can_come_late(self) -> Self:
        if self.communication.overlap_param_gather is not True:
            return self
        several = self.pipeline_stages > 1 and self.pipeline.virtual_stages > 1
        if not several or self.dc.join == "islands":
            raise ValueError(
                "communication.overlap_param_gather requires pipeline stages of one program with "
                "pipeline.virtual_stages of 2 or more: the weights of a chunk come beside the ones "
                "before. Remove overlap_param_gather"
            )
        if self.zero.stage == 0:
            raise ValueError(
                "communication.overlap_param_gather requires zero.stage=1: with 0 each rank holds "
                "whole weights, and gathers none. Set zero.stage, or remove overlap_param_gather"
            )
        return self

    @property
    def needs_layer_loops(self) -> str | None:
        """The setting for which layers stand in loops, if any."""
        if self.pipeline_stages > 1 and self.dc.join != "islands":
            return f"{self.pipeline_stages} pipeline stages"
        for axis in ("expert", "context", "tensor"):
            if (size := getattr(self.mesh, axis)) > 1:
                return f"mesh.{axis}={size}"
        if self.communication.overlap_grad_reduce is True:
            return "communication.overlap_grad_reduce"
        return f"zero.stage={self.zero.stage}" if self.zero.stage >= 2 else None

    @pydantic.model_validator(mode="after")
    def _layers_can_be_unrolled(self) -> Self:
        needed_for = self.needs_layer_loops
        if self.scan_layers is False and needed_for is not None:
            raise ValueError(
                f"scan_layers=false cannot be with {needed_for}: what is sent beside the layers "
                "needs loops over them. Remove scan_layers"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _compression_has_sums(self) -> Self:
        compression = self.communication.gradient_compression
        if compression == "none":
            return self
        if self.dc.role == "stage":
            raise ValueError(
                f"communication.gradient_compression={compression} requires dc.role=data: with "
                "dc.role=stage the sites send activations and sum no gradients. Remove "
                "communication.gradient_compression"
            )
        if self.zero.across_sites:
            raise ValueError(
                f"communication.gradient_compression={compression} requires "
                "zero.across_sites=false: it gives all sites the same sums, and zero.across_sites "
                "sums each part for one site. Remove one of them"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _batch_divides(self) -> Self:
        axes = ("dc", "data", "expert") if self.dc.role == "data" else ("data", "expert")
        sizes = {axis: getattr(self.mesh, axis) for axis in axes}
        sizes["microbatches"] = self.batch.microbatches
        shares = math.prod(sizes.values())
        batch = self.batch.global_batch_size
        if batch % shares:
            below = batch // shares * shares
            fitting = f"{below} or {below + shares}" if below else str(shares)
            product = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(
                f"batch.global_batch_size={batch} does not divide over {product} = {shares}; "
                f"{fitting} would"
            )
        return self


def check_layout(layout: Layout, model: AnyModel) -> None:
    """Refuse a layout that a model cannot be trained in; touches no device.

    Args:
        layout: one whose sections allow each other.
        model: the model.

    Raises:
        ValueError: a size of the model does not divide, or the model lacks something.
    """
    layers, length = model.num_stacked_layers, layout.batch.sequence_length
    check_parallelism(model, layout.model_parallelism, length)
    together = layout.communication.bucket_layers
    if together != "auto" and layers % together:
        fitting = listed(n for n in range(1, layers + 1) if layers % n == 0)
        raise ValueError(
            f"communication.bucket_layers={together} does not divide the model's {layers} "
            f"layers; {fitting} would"
        )
    check_stages(
        layout.pipeline, sites=layout.pipeline_sites, stage=layout.mesh.stage, layers=layers
    )
    if layout.head_shares > 1 and model.num_nextn_predict_layers:
        raise ValueError(
            f"pipeline.head={layout.pipeline.head} requires model.num_nextn_predict_layers=0: "
            "modules for later tokens read whole sequences. Set head to last_stage"
        )
    if layout.communication.gradient_compression == "int8" and model.use_router_bias:
        raise ValueError(
            "communication.gradient_compression=int8 requires model.use_router_bias=false: "
            "counts of experts' tokens would share the scales of gradients. Set it to bf16"
        )
    if length > model.max_position_embeddings:
        raise ValueError(
            f"batch.sequence_length={length} is longer than the model's "
            f"max_position_embeddings={model.max_position_embeddings}"
        )
