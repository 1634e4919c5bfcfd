"""A candidate of the search: the sections of a run's config, which nothing has validated.

Nothing in it is made: no mesh, no schedule, no program, so that a search can hold thousands of
them. Sites may differ in it, which no config says.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

from geojax.config.layout import Layout
from geojax.config.layout_sections import BatchSettings
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import Placement


@dataclasses.dataclass(frozen=True)
class SiteShare:
    """One site's part of a run in which sites differ in number or kind of accelerators."""

    stages: int
    """Stages of one pipeline that lie in the site."""
    data: int
    """Data-parallel replicas in the site."""
    sequences: int
    """Sequences of the global batch that the site trains on; with role "stage" all of them."""


class LayoutCandidate(Layout):
    """A layout as the search varies it: `pipeline.layers` of null makes stages take as long."""

    site_shares: tuple[SiteShare, ...] | None = None
    """The part of each site where they differ; None: all sites are alike. The sections are then
    those of the first site."""

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Return the candidate that is `layout`, of a step of the full batch."""
        if layout.batch.ramp is not None:
            layout = layout.of_batch(layout.batch.global_batch_size)
        sections = {name: getattr(layout, name) for name in Layout.model_fields}
        return cls.model_construct(set(sections), **sections)

    @classmethod
    def made(
        cls,
        *,
        sequence_length: int,
        microbatches: int = 1,
        microbatch_size: int = 1,
        **sections: Any,
    ) -> Self:
        """Return a layout of sites that are alike; `sections` are as `changed` takes them."""
        batch = BatchSettings(global_batch_size=1, sequence_length=sequence_length)
        layout = cls.of(Layout(batch=batch)).changed(**sections)
        return layout.with_microbatches(microbatches, microbatch_size)

    @property
    def pipeline_stages(self) -> int:
        """The number of stages of one pipeline, over all sites that it runs through."""
        return sum(self.stages_per_site)

    @property
    def splits_backward(self) -> bool:
        """True if the gradients of a pipeline's weights are actions of their own."""
        return self.pipeline_stages > 1 and schedule_entry(self.pipeline.schedule).split_backward

    @property
    def stages_per_site(self) -> tuple[int, ...]:
        """Stages of one pipeline in each site that it runs through."""
        if self.dc.role == "stage" and self.site_shares is not None:
            return tuple(share.stages for share in self.site_shares)
        return (self.mesh.stage,) * self.pipeline_sites

    @property
    def site_of_stages(self) -> tuple[int, ...]:
        """Site of each stage of one pipeline, by its number among those that it runs through."""
        return tuple(site for site, count in enumerate(self.stages_per_site) for _ in range(count))

    @property
    def site_of_chunks(self) -> tuple[int, ...]:
        """Site of each chunk of layers, in the model's order."""
        return tuple(self.site_of_stages[stage] for stage in self.placement.stage_of)

    @property
    def placement(self) -> Placement:
        """The stage of each chunk of layers."""
        if self.pipeline_stages == 1:
            return Placement.linear(1)
        entry = schedule_entry(self.pipeline.schedule)
        return entry.placement(self.stages_per_site, self.pipeline.virtual_stages)

    @property
    def is_trainable(self) -> bool:
        """True if `geojax train` can run it: all sites have the same mesh and as many sequences."""
        return self.site_shares is None

    @property
    def data_ranks(self) -> int:
        """Ranks over all sites that have sequences of their own."""
        if self.dc.role == "stage":
            return self.mesh.data * self.mesh.expert
        if self.site_shares is not None:
            return sum(share.data for share in self.site_shares) * self.mesh.expert
        return self.mesh.dc * self.mesh.data * self.mesh.expert

    @property
    def microbatch_size(self) -> int:
        """Sequences of a microbatch on one data-parallel rank."""
        sequences, ranks = self.batch.global_batch_size, self.data_ranks
        if self.site_shares is not None and self.dc.role == "data":
            first = self.site_shares[0]
            sequences, ranks = first.sequences, first.data * self.mesh.expert
        return sequences // (ranks * self.batch.microbatches)

    @property
    def devices_per_stage(self) -> int:
        """Devices of one stage in one site, all of its data-parallel replicas together."""
        return self.mesh.data * self.mesh.expert * self.mesh.context * self.mesh.tensor

    @property
    def devices_per_site(self) -> tuple[int, ...]:
        """Devices of each site."""
        ranks = self.mesh.expert * self.mesh.context * self.mesh.tensor
        if self.site_shares is not None:
            return tuple(ranks * share.stages * share.data for share in self.site_shares)
        return (self.mesh.stage * self.devices_per_stage,) * self.mesh.dc

    @property
    def devices(self) -> int:
        """Devices over all sites."""
        return sum(self.devices_per_site)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Sizes of the mesh axes; stages that sites share unevenly count as those of one site."""
        sizes = dict(self.mesh)
        if self.site_shares is not None and self.dc.role == "stage":
            sizes |= {"dc": 1, "stage": self.pipeline_stages}
        return sizes

    def with_microbatches(self, microbatches: int, size: int) -> Self:
        """Return it with so many microbatches of `size` sequences on each data-parallel rank.

        Where sites share the batch unevenly, it is the first site that has so many.
        """
        sequences = self.data_ranks * microbatches * size
        if self.site_shares is not None and self.dc.role == "data":
            sequences = sum(share.sequences for share in self.site_shares)
        return self.changed(batch={"microbatches": microbatches, "global_batch_size": sequences})

    def with_shares(self, shares: Sequence[SiteShare] | None) -> Self:
        """Return it with these parts of its sites."""
        return self.model_copy(update={"site_shares": None if shares is None else tuple(shares)})

    def of_site(self, site: int) -> Self:
        """Return the layout of a site with role "data" if all sites had its share."""
        if self.site_shares is None or self.dc.role == "stage":
            return self
        share, size = self.site_shares[site], self.microbatch_size
        microbatches = share.sequences // (share.data * self.mesh.expert * size)
        alone = self.with_shares(None).changed(mesh={"data": share.data})
        return alone.with_microbatches(microbatches, size)

    @property
    def written_microbatches(self) -> str:
        """The microbatches of each site's ranks, such as "5+2", or of all where they are alike."""
        if self.site_shares is None or self.dc.role == "stage":
            return str(self.batch.microbatches)
        sites = range(self.mesh.dc)
        return "+".join(str(self.of_site(site).batch.microbatches) for site in sites)

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
        mesh = self.mesh
        sizes = {
            "dc": str(mesh.dc),
            "pp": self.in_sites("stages", self.pipeline_stages),
            "vp": str(self.pipeline.virtual_stages),
            "dp": self.in_sites("data", mesh.data),
            "ep": str(mesh.expert),
            "cp": str(mesh.context),
            "tp": str(mesh.tensor),
        }
        parts = [f"{name} {size}" for name, size in sizes.items() if size != "1"]
        if mesh.dc > 1:
            parts.append(f"{self.dc.role}, {self.dc.join}")
        if self.pipeline_stages > 1:
            parts.append(self.pipeline.schedule)
        if mesh.data * mesh.expert > 1:
            parts.append(f"ZeRO {self.zero.stage}")
        parts.append(f"{self.written_microbatches} x {self.microbatch_size} sequences")
        return ", ".join([*parts, f"remat {self.remat}", self.precision])
