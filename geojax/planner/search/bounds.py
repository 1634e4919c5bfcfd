"""A time that no step of a layout can be below, in microseconds a call.

    work      microbatches x the busiest stage's layers, dealt out as evenly as they can be
    ramp      a forward's way to the busiest stage, and a backward's way back from it
    in site   weights gathered and gradients scattered once, where nothing hides them
    link      gradients that leave when the last backward is done: of a stage's first chunk, the
              embedding and the head

The work of a layer is that of the cost model (`geojax.planner.cost.chunks`); layouts that differ in
data-parallel ranks, stages or schedule alone share it.
"""

import dataclasses
import math
from collections.abc import Sequence

from geojax.collectives import wire_format
from geojax.pipeline.registry import schedule_entry
from geojax.planner.buckets import link_share
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.head_forms import with_shared_vocabulary
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.memory import held_parameters
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.site_work import SiteWork, SiteWorks
from geojax.precision import policy


class Bounds:
    """Lower bounds of the steps of a request's layouts."""

    def __init__(self, request: PlanRequest, calibration: Calibration):
        """`calibration` says what accelerators and networks reach of their published rates."""
        self._request, self._calibration = request, calibration
        self.works = SiteWorks(request, calibration)
        self._link = link_share(request.topology, request.common_accelerators)

    def seconds(self, layout: LayoutCandidate) -> float | None:
        """Return the bound of a layout; None: its layers are not those that were measured.

        Raises:
            UserError: a peak is not known.
        """
        works = self.works.of(layout)
        if works is None:
            return None
        layers, stages = self._request.model.num_stacked_layers, layout.pipeline_stages
        if stages == 1:
            return _replicas_seconds(layout, [work.of_model(layers) for work in works])
        if layout.dc.role == "data":  # a pipeline in each site, of which the slowest counts
            works = (max(works, key=lambda work: work.layer),)
        if layout.dc.join == "one_program":  # the stages of a site may share the head
            waits = 1 - 1 / layout.mesh.stage
            works = tuple(
                dataclasses.replace(work, last=work.last - waits * work.head) for work in works
            )
        virtual = layout.pipeline.virtual_stages
        total = layout.batch.microbatches * _busiest(works, layout.stages_per_site, virtual, layers)
        split = schedule_entry(layout.pipeline.schedule).split_backward
        # Gradients of weights that can wait fill the way back.
        of_layer = min(work.forward_of_layer if split else work.layer for work in works)
        # A site that is slow may have as little as a layer in a chunk.
        chunk = (layers // (stages * virtual) if len(set(works)) == 1 else 1) * of_layer
        first, *others = layout.stages_per_site
        # A pipeline passes all chunks of a site before it crosses to the next one.
        ahead = (
            first - 1 + sum(others) * (virtual if layout.pipeline.schedule == "interleaved" else 1)
        )
        return total + ahead * chunk + self._after_backward(layout)

    def _after_backward(self, layout: LayoutCandidate) -> float:
        """Return the time of weights and gradients of a pipeline, which nothing in it hides."""
        model = self._request.model
        held = held_parameters(model, with_shared_vocabulary(model, layout))
        group = max(
            (
                SiteNetworks(site, layout.mesh_sizes, self._calibration).group(("data", "expert"))
                for site in self._request.topology.sites
            ),
            key=lambda group: group.bytes_per_second,
        )
        dtypes = policy(layout.precision)
        gathered = dtypes.compute_dtype.itemsize + dtypes.reduce_dtype.itemsize
        seconds = group.seconds(gathered * held.all * (1 - 1 / group.ranks), 0)
        if layout.dc.role == "stage" or self._link is None:
            return seconds
        last = held.layers * held.layer / layout.pipeline.virtual_stages
        wire = wire_format(layout.communication.gradient_compression)
        itemsize: float = dtypes.reduce_dtype.itemsize
        if wire is not None:
            itemsize = wire.message_bytes(2**20) / 2**20
        elif layout.dc.join == "one_program":
            # With state sharded over sites half of the gradients go, and half of the weights.
            itemsize = min(itemsize, gathered / 2)
        return seconds + itemsize * last / group.ranks / self._link.bytes_per_second


def _replicas_seconds(layout: LayoutCandidate, seconds: Sequence[float]) -> float:
    """Return the time of all sequences in sites that take so long for a microbatch."""
    if layout.site_shares is None:
        return layout.batch.microbatches * max(seconds)
    ranks = layout.mesh.expert * layout.microbatch_size
    rate = sum(
        share.data * ranks / each for share, each in zip(layout.site_shares, seconds, strict=True)
    )
    return layout.batch.global_batch_size / rate


def _busiest(
    works: Sequence[SiteWork], stages_per_site: Sequence[int], virtual_stages: int, layers: int
) -> float:
    """Return the least time of the busiest stage: it has whole layers, and one has the ends.

    Stages of several speeds take at least as long as if layers could be split.
    """
    stages, layer = sum(stages_per_site), min(work.layer for work in works)
    ends = min(work.ends for work in works)
    whole = min(
        max(
            max(virtual_stages, math.ceil((layers - last) / (stages - 1))) * layer,
            last * layer + ends,
        )
        for last in range(virtual_stages, layers // stages + 2)
    )
    speed = sum(count / work.layer for count, work in zip(stages_per_site, works, strict=True))
    split = layers + works[0].first / works[0].layer + works[-1].last / works[-1].layer
    return max(whole, split / speed)
