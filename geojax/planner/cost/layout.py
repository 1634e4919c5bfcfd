"""A candidate of the search: all that may be chosen for a given model, batch and topology.

Nothing in it is made: no mesh, no schedule, no program, so that a search can hold thousands of
them. Its `sections` are those of a run's config (`geojax.config.layout`).
"""

import dataclasses
from typing import Any, Literal

from geojax.collectives import WireName
from geojax.config import layout as config
from geojax.config.layout_sections import (
    BatchSettings,
    CommunicationSettings,
    MeshSettings,
    ParallelismSettings,
    ZeroSettings,
)
from geojax.config.pipeline_settings import DcSettings, PipelineSettings
from geojax.mesh import DcRole, Join
from geojax.models.chunk.remat import Remat
from geojax.models.parallel.parallelism import ContextMethod, Parallelism
from geojax.pipeline.registry import schedule_entry
from geojax.precision import PrecisionName


@dataclasses.dataclass(frozen=True)
class SiteShare:
    """One site's part of a run in which sites differ in number or kind of accelerators."""

    stages: int
    """Stages of one pipeline that lie in the site."""
    data: int
    """Data-parallel replicas in the site."""
    sequences: int
    """Sequences of the global batch that the site trains on; with role "stage" all of them."""


@dataclasses.dataclass(frozen=True)
class LayoutCandidate:
    """A layout as the search varies it: plain numbers that nothing has validated."""

    dc: int = 1
    """Sites, in the topology's order."""

    join: Join = "one_program"
    """Runtimes: one that spans all sites, or one in every site."""

    dc_role: DcRole = "data"
    """Role of the sites."""

    pipeline_stages: int = 1
    """Stages of one pipeline, over all sites that it runs through."""

    virtual_stages: int = 1
    """Chunks of layers that each stage holds."""

    layers: tuple[int, ...] | None = None
    """Layers of each chunk, in the model's order; None: so that stages take about as long."""

    data: int = 1
    """Data-parallel replicas in a site."""

    expert: int = 1
    """Ranks in a site that share the experts; for everything else data-parallel ranks."""

    context: int = 1
    """Ranks that share one sequence."""

    context_method: ContextMethod = "ring"
    """Method of attention over a sequence that is sharded over `context`."""

    tensor: int = 1
    """Ranks that share one layer."""

    sequence_parallel: bool = False
    """Shard the sequence over `tensor` between the matrix products."""

    site_shares: tuple[SiteShare, ...] | None = None
    """The part of each site where they differ; None: all sites are alike."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """State that is sharded over (data, expert), as `zero.stage`."""

    shard_across_sites: bool = False
    """Shard master weights and optimizer state over sites as well."""

    reshard_after_forward: bool = True
    """ZeRO 3: gather the weights again for the backward pass."""

    microbatch_size: int = 1
    """Sequences of a microbatch on one data-parallel rank."""

    microbatches: int = 1
    """Microbatches of a step on each data-parallel rank, or pipeline."""

    remat: Remat = "none"
    """Activations that the backward pass computes again."""

    schedule: str = "1f1b"
    """Name of an entry of `geojax.pipeline.registry`, where there are pipeline stages."""

    memory_limit: int | None = None
    """The most microbatches that a stage may have in flight; None: as many as the schedule has."""

    hop_ticks: int | Literal["auto"] = "auto"
    """Ticks of a hop between sites of one program; "auto": one or two, by the link."""

    bucket_bytes: int | Literal["auto"] | None = "auto"
    """Most bytes of one message of the gradient reduction; None: one message a leaf; "auto": by
    the link."""

    overlap_grad_reduce: bool | Literal["auto"] = "auto"
    """Reduce the gradients of a bucket of layers while the layers before them go backwards; "auto":
    where that exposes less."""

    bucket_layers: int | Literal["auto"] = "auto"
    """With `overlap_grad_reduce`: layers of a bucket; "auto": by the link."""

    gradient_compression: WireName = "none"
    """Format of gradients on the link between sites."""

    precision: PrecisionName = "bf16"
    """Dtypes of weights and matrix products."""

    @property
    def stages_per_site(self) -> tuple[int, ...]:
        """Stages of one pipeline in each site that it runs through."""
        if self.dc_role == "data":
            return (self.pipeline_stages,)
        if self.site_shares is not None:
            return tuple(share.stages for share in self.site_shares)
        return (self.pipeline_stages // self.dc,) * self.dc

    @property
    def site_of_stages(self) -> tuple[int, ...]:
        """Site of each stage of one pipeline, by its number among those that it runs through."""
        return tuple(site for site, count in enumerate(self.stages_per_site) for _ in range(count))

    @property
    def site_of_chunks(self) -> tuple[int, ...]:
        """Site of each chunk of layers, in the model's order."""
        if self.pipeline_stages == 1:
            return (0,)
        entry = schedule_entry(self.schedule)
        placement = entry.placement(self.stages_per_site, self.virtual_stages)
        return tuple(self.site_of_stages[stage] for stage in placement.stage_of)

    @property
    def is_trainable(self) -> bool:
        """True if `geojax train` can run it: all sites have the same mesh and as many sequences."""
        return self.site_shares is None

    @property
    def data_ranks(self) -> int:
        """Ranks over all sites that have sequences of their own."""
        if self.dc_role == "stage":
            return self.data * self.expert
        if self.site_shares is not None:
            return sum(share.data for share in self.site_shares) * self.expert
        return self.dc * self.data * self.expert

    @property
    def devices_per_stage(self) -> int:
        """Devices of one stage in one site, all of its data-parallel replicas together."""
        return self.data * self.expert * self.context * self.tensor

    @property
    def devices_per_site(self) -> tuple[int, ...]:
        """Devices of each site."""
        ranks = self.expert * self.context * self.tensor
        if self.site_shares is not None:
            return tuple(ranks * share.stages * share.data for share in self.site_shares)
        stages = self.stages_per_site[0]
        return (stages * self.devices_per_stage,) * self.dc

    @property
    def devices(self) -> int:
        """Devices over all sites."""
        return sum(self.devices_per_site)

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        if self.site_shares is not None and self.dc_role == "data":
            return sum(share.sequences for share in self.site_shares)
        return self.data_ranks * self.microbatches * self.microbatch_size

    @property
    def parallelism(self) -> Parallelism:
        """Sharding of model and sequences."""
        return Parallelism(
            tensor=self.tensor,
            sequence=self.sequence_parallel and self.tensor > 1,
            context=self.context,
            context_method=self.context_method,
            expert=self.expert,
        )

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes; stages that sites share unevenly count as those of one site."""
        uneven = self.site_shares is not None and self.dc_role == "stage"
        return {
            "dc": 1 if uneven else self.dc,
            "stage": self.pipeline_stages if uneven else self.stages_per_site[0],
            "data": self.data,
            "expert": self.expert,
            "context": self.context,
            "tensor": self.tensor,
        }

    def sections(self, sequence_length: int) -> config.Layout:
        """Return it as the sections of a run's config that make it; nothing validates them."""
        chosen: dict[str, Any] = {
            "mesh": MeshSettings().model_copy(update=self.mesh_sizes),
            "parallelism": ParallelismSettings.model_construct(
                sequence=self.sequence_parallel, context_method=self.context_method
            ),
            "dc": DcSettings.model_construct(role=self.dc_role, join=self.join),
            "zero": ZeroSettings.model_construct(
                stage=self.zero_stage,
                across_sites=self.shard_across_sites,
                reshard_after_forward=self.reshard_after_forward,
            ),
            "batch": BatchSettings.model_construct(
                global_batch_size=self.global_batch_size,
                sequence_length=sequence_length,
                microbatches=self.microbatches,
            ),
            "precision": self.precision,
            "remat": self.remat,
            "communication": CommunicationSettings.model_construct(
                bucket_bytes=self.bucket_bytes,
                gradient_compression=self.gradient_compression,
                overlap_grad_reduce=self.overlap_grad_reduce,
                bucket_layers=self.bucket_layers,
            ),
        }
        if self.pipeline_stages > 1:
            chosen["pipeline"] = PipelineSettings.model_construct(
                schedule=self.schedule,
                virtual_stages=self.virtual_stages,
                layers=self.layers,
                memory_limit=self.memory_limit,
                hop_ticks=self.hop_ticks,
            )
        return config.Layout.model_construct(**chosen)

    def of_site(self, site: int) -> "LayoutCandidate":
        """Return the layout of a site with role "data" if all sites had its share."""
        if self.site_shares is None or self.dc_role == "stage":
            return self
        share = self.site_shares[site]
        microbatches = share.sequences // (share.data * self.expert * self.microbatch_size)
        return dataclasses.replace(
            self, site_shares=None, data=share.data, microbatches=microbatches
        )

    @property
    def written_microbatches(self) -> str:
        """The microbatches of each site's ranks, such as "5+2", or of all where they are alike."""
        if self.site_shares is None or self.dc_role == "stage":
            return str(self.microbatches)
        return "+".join(str(self.of_site(site).microbatches) for site in range(self.dc))

    def in_sites(self, part: Literal["stages", "data"], alike: int) -> str:
        """Write a size site by site, such as "32+16", where `site_shares` differ in it.

        Args:
            part: field of `SiteShare`.
            alike: the size where they do not.
        """
        sizes = [getattr(share, part) for share in self.site_shares or ()]
        return "+".join(map(str, sizes)) if len(set(sizes)) > 1 else str(alike)

    def __str__(self) -> str:
        """Name the sizes above 1 and the choices that matter for them."""
        sizes = {
            "dc": str(self.dc),
            "pp": self.in_sites("stages", self.pipeline_stages),
            "vp": str(self.virtual_stages),
            "dp": self.in_sites("data", self.data),
            "ep": str(self.expert),
            "cp": str(self.context),
            "tp": str(self.tensor),
        }
        parts = [f"{name} {size}" for name, size in sizes.items() if size != "1"]
        if self.dc > 1:
            parts.append(f"{self.dc_role}, {self.join}")
        if self.pipeline_stages > 1:
            parts.append(self.schedule)
        if self.data * self.expert > 1:
            parts.append(f"ZeRO {self.zero_stage}")
        parts.append(f"{self.written_microbatches} x {self.microbatch_size} sequences")
        return ", ".join([*parts, f"remat {self.remat}", self.precision])
