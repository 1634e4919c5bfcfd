"""A request without one of its sites, which may be faster where sites differ."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from geojax.errors import UserError
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.prediction import Prediction
from geojax.planner.search.request import PlanRequest, joins_of
from geojax.planner.search.search import Candidate, search
from geojax.planner.search.sensitivity import LayoutTimer
from geojax.topology import Topology


class Without(NamedTuple):
    """The fastest layout of the sites but one."""

    site: str
    """Name of the site that is left out."""
    best: Candidate


def without_each_site(
    request: PlanRequest, timer: LayoutTimer, calibration: Calibration
) -> Iterator[Without]:
    """Yield the fastest layout without each site, where there is one.

    Args:
        request: what is asked for.
        timer: predicts the step of a layout.
        calibration: what accelerators and networks reach of their published rates.
    """
    for left_out in request.topology.sites:
        fewer = _without(request.topology, left_out.name)
        with contextlib.suppress(UserError):  # the sites between which it lay have no link
            other = dataclasses.replace(request, topology=fewer, joins=joins_of(fewer))
            found = search(other, functools.partial(_timed, timer, fewer), calibration, keep=1)
            if found.best:
                yield Without(left_out.name, found.best[0])


def _without(topology: Topology, name: str) -> Topology:
    sites = tuple(site for site in topology.sites if site.name != name)
    links = tuple(link for link in topology.links if name not in link.sites)
    return topology.model_copy(update={"sites": sites, "links": links})


def _timed(timer: LayoutTimer, topology: Topology, layout: LayoutCandidate) -> Prediction:
    return timer(layout, topology)
