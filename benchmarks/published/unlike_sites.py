"""Llama-3 70B on 2,048 H100 beside 1,024 A100, planned by role, and on the H100 alone."""

import dataclasses

from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.cost.prediction import Prediction
from geojax.planner.search.one_site import one_site_efficiency
from geojax.planner.search.request import PlanRequest, joins_of
from geojax.planner.search.search import Candidate, search
from geojax.topology import Topology

TOPOLOGY, MODEL = "h100-and-a100-sites", "llama3-70b"
GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH = 6144, 8192


@dataclasses.dataclass(frozen=True)
class UnlikeSites:
    """Plans on some of the sites."""

    topology: Topology
    calibration: Calibration

    def alone(self, site: int) -> "UnlikeSites":
        """Return the same with one of the sites."""
        own = {"sites": self.topology.sites[site : site + 1], "links": ()}
        return UnlikeSites(self.topology.model_copy(update=own), self.calibration)

    def best(self, role: str) -> Candidate:
        """Return the fastest layout of a role."""
        request = PlanRequest(
            ModelConfig.load(MODEL),
            self.topology,
            GLOBAL_BATCH_SIZE,
            SEQUENCE_LENGTH,
            roles=(role,),
            joins=joins_of(self.topology),
        )
        found = search(
            request, lambda each: self._predict(each, self.topology), self.calibration, keep=1
        )
        return found.best[0]

    def efficiency(self, layout: LayoutCandidate) -> float:
        """Return the efficiency against one site with the FLOP/s of all."""
        return one_site_efficiency(layout, self.topology, self._predict)

    def _predict(self, layout: LayoutCandidate, topology: Topology) -> Prediction:
        return predict(
            ModelConfig.load(MODEL),
            layout,
            topology,
            calibration=self.calibration,
        )
