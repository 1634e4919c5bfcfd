"""Work of one microbatch in each site of a request, which layouts of other sizes share."""

import dataclasses

from geojax.errors import UserError
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.chunks import SitePieces, site_pieces
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layer import LayerTimes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.tensor_overlap import joint_share
from geojax.planner.search.request import PlanRequest


@dataclasses.dataclass(frozen=True)
class SiteWork:
    """Seconds of one microbatch on a device of a site."""

    layer: float
    forward_of_layer: float
    first: float
    """Embedding, and what else the first stage does besides its layers."""
    last: float
    """Head, and what else the last stage does."""
    head: float
    """The part of `last` that stages of one program may share."""

    @property
    def ends(self) -> float:
        """Seconds of embedding and head."""
        return self.first + self.last

    def of_model(self, layers: int) -> float:
        """Return the time of a whole model of so many layers."""
        return layers * self.layer + self.ends


class SiteWorks:
    """The work in each site for all layouts of a request, by the cost model.

    Layouts that differ in data-parallel ranks, stages or schedule alone share it, unless one of two
    splits backwards.
    """

    def __init__(self, request: PlanRequest, calibration: Calibration):
        """`calibration` says what accelerators and networks reach of their published rates."""
        self._request, self._calibration = request, calibration
        self._known: dict[object, tuple[SiteWork, ...] | None] = {}

    def of(self, layout: LayoutCandidate) -> tuple[SiteWork, ...] | None:
        """Return the work of each site; None: the layers are not those that were measured.

        Raises:
            UserError: a peak is not known.
        """
        key = (
            layout.microbatch_size,
            layout.mesh.expert,
            layout.mesh.context,
            layout.mesh.tensor,
            layout.parallelism,
            layout.batch.microbatches > 1,
            layout.precision,
            layout.remat,
            self._joint_share(layout),
            layout.splits_backward,
        )
        if key not in self._known:
            self._known[key] = self._timed(layout)
        return self._known[key]

    def _joint_share(self, layout: LayoutCandidate) -> float:
        """Return the part of a layout's passes whose messages travel beside the other pass."""
        model, site = self._request.model, self._request.topology.sites[0]
        if layout.mesh.tensor == 1 or layout.placement.chunks < model.num_stacked_layers:
            return 0.0
        return joint_share(LayerTimes(model, layout, site, self._calibration, GEOJAX))

    def _timed(self, layout: LayoutCandidate) -> tuple[SiteWork, ...] | None:
        request = self._request
        try:
            sites = site_pieces(
                request.model,
                layout.changed(pipeline={"head": "last_stage"}),
                request.topology,
                self._calibration,
                GEOJAX,
            )
        except UserError:
            if self._calibration.stage_times is None:
                raise
            return None
        return tuple(map(_work_of, sites))


def _work_of(site: SitePieces) -> SiteWork:
    return SiteWork(
        sum(piece.exposed for piece in site.layer),
        sum(piece.forward for piece in site.layer),
        sum(piece.exposed for piece in site.first),
        sum(piece.exposed for piece in site.last),
        sum(piece.exposed for piece in site.last if piece.name in ("head", "loss")),
    )
