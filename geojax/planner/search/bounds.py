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

from geojax.collectives import wire_format
from geojax.errors import UserError
from geojax.pipeline.registry import schedule_entry
from geojax.planner.buckets import link_share
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.chunks import SitePieces, site_pieces
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layout import Layout
from geojax.planner.cost.memory import held_parameters
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.search.request import PlanRequest
from geojax.precision import policy


@dataclasses.dataclass(frozen=True)
class _Work:
    """Seconds of one microbatch."""

    layer: float
    forward_of_layer: float
    ends: float
    """Embedding and head."""

    def busiest(self, layers: int, stages: int, virtual_stages: int) -> float:
        """Return the time of the busiest stage, if one has the head and all have whole layers."""
        return min(
            max(
                max(virtual_stages, math.ceil((layers - last) / (stages - 1))) * self.layer,
                last * self.layer + self.ends,
            )
            for last in range(virtual_stages, layers // stages + 2)
        )


class Bounds:
    """Lower bounds of the steps of a request's layouts."""

    def __init__(self, request: PlanRequest, calibration: Calibration):
        """`calibration` says what accelerators and networks reach of their published rates."""
        self._request, self._calibration = request, calibration
        self._link = link_share(request.topology, request.site.accelerators)
        self._known: dict[Layout, _Work | None] = {}

    def seconds(self, layout: Layout) -> float | None:
        """Return the bound of a layout; None: its layers are not those that were measured.

        Raises:
            UserError: a peak is not known.
        """
        work = self._work(layout)
        if work is None:
            return None
        layers, stages = self._request.model.num_stacked_layers, layout.pipeline_stages
        if stages == 1:
            return layout.microbatches * (layers * work.layer + work.ends)
        virtual = layout.virtual_stages
        total = layout.microbatches * work.busiest(layers, stages, virtual)
        split = schedule_entry(layout.schedule).split_backward
        # Gradients of weights that can wait fill the way back.
        of_layer = work.forward_of_layer if split else work.layer
        chunk = layers // (stages * virtual) * of_layer
        first, *others = layout.stages_per_site
        # A pipeline passes all chunks of a site before it crosses to the next one.
        ahead = first - 1 + sum(others) * (virtual if layout.schedule == "interleaved" else 1)
        return total + ahead * chunk + self._after_backward(layout)

    def _work(self, layout: Layout) -> _Work | None:
        key = dataclasses.replace(
            layout,
            pipeline_stages=1,
            virtual_stages=1,
            data=1,
            microbatches=1,
            schedule="",
            memory_limit=None,
            dc_role="data",
            overlap_grad_reduce="auto",
        )
        if key not in self._known:
            self._known[key] = self._timed(layout)
        return self._known[key]

    def _timed(self, layout: Layout) -> _Work | None:
        request = self._request
        try:
            sites = site_pieces(
                request.model,
                layout,
                request.topology,
                request.sequence_length,
                self._calibration,
                GEOJAX,
            )
        except UserError:
            if self._calibration.stage_times is None:
                raise
            return None
        return min(map(_work_of, sites), key=lambda work: work.layer)

    def _after_backward(self, layout: Layout) -> float:
        """Return the time of weights and gradients of a pipeline, which nothing in it hides."""
        held = held_parameters(self._request.model, layout, self._request.sequence_length)
        networks = SiteNetworks(self._request.site, layout.mesh_sizes, self._calibration)
        group = networks.group(("data", "expert"))
        dtypes = policy(layout.precision)
        gathered = dtypes.compute_dtype.itemsize + dtypes.reduce_dtype.itemsize
        seconds = group.seconds(gathered * held.all * (1 - 1 / group.ranks), 0)
        if layout.dc_role == "stage" or self._link is None:
            return seconds
        last = held.layers * held.layer / layout.virtual_stages
        wire = wire_format(layout.gradient_compression)
        itemsize: float = dtypes.reduce_dtype.itemsize
        if wire is not None:
            itemsize = wire.message_bytes(2**20) / 2**20
        elif layout.join == "one_program":
            # With state sharded over sites half of the gradients go, and half of the weights.
            itemsize = min(itemsize, gathered / 2)
        return seconds + itemsize * last / group.ranks / self._link.bytes_per_second


def _work_of(site: SitePieces) -> _Work:
    layer = sum(piece.exposed for piece in site.layer)
    forward = sum(piece.forward for piece in site.layer)
    ends = sum(piece.exposed for piece in (*site.first, *site.last))
    return _Work(layer, forward, ends)
