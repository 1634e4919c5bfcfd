"""The search: every layout is bounded, those with the lowest bounds are timed, the fastest varied.

    shapes       meshes x microbatches x schedules that divide (`space`)
    fitting      the least ZeRO stage and remat that fit, in closed form (`fit`)
    bounds       seconds that no step of a layout is below (`bounds`)
    timed        in the order of their bounds, until the next bound is above the times that are
                 kept; sites that differ get layers or sequences by their speed (`proportions`)
    varied       the remaining choices of the fastest (`variations`)
    settled      layers and buckets, as they were timed

A time takes milliseconds without a pipeline and up to seconds with one, whose schedule is made and
simulated, so that `MOST_SIMULATED` ends the search where the bounds do not.
"""

import collections
import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable

from geojax.errors import UserError
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.prediction import Prediction
from geojax.planner.memory_phases import StepMemory
from geojax.planner.search.bounds import Bounds
from geojax.planner.search.fit import fits_in_parts, fitting, least_room
from geojax.planner.search.proportions import in_proportion
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.space import shapes
from geojax.planner.search.variations import variations

Timer = Callable[[LayoutCandidate], Prediction]
"""Predicts the step of a layout."""

MOST_SIMULATED = 2**16
"""Most (microbatch, chunk) pairs of all the pipelines that are timed, about ten seconds of them."""

LEAST_OF_ROLE = MOST_SIMULATED // 4
"""Such pairs that each role, in each way to join sites, has in any case, so that those with low
bounds do not leave the others' fastest layouts untimed."""

NOT_MEASURED = "not measured"
"""Constraint that refuses layouts whose layers differ from those that `geojax probe` has timed."""

VARIED = 4
"""Fastest layouts whose remaining choices are varied."""

MOST_VARIED = 2**15
"""Most (microbatch, chunk) pairs of the pipelines that are timed in doing so."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout that fits, timed."""

    layout: LayoutCandidate
    memory: StepMemory
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.prediction.step_seconds


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The layouts that were found, and what became of the others."""

    best: tuple[Candidate, ...]
    """Fastest layout of each way to train (role, join, mesh, schedule, and if `geojax train` can),
    fastest first; the last is one more where it is the only one that `geojax train` runs."""
    refused: Counter[str]
    """Layouts that cannot be, by the constraint that refuses them."""
    fitting: int
    """Layouts that fit."""
    timed: int
    """Layouts that were timed."""
    next_bound: float | None
    """Lowest bound of those that were not; None: all were timed."""


def search(
    request: PlanRequest, timer: Timer, calibration: Calibration, *, keep: int = 8
) -> SearchResult:
    """Find the fastest layouts that fit.

    Args:
        request: what is asked for.
        timer: predicts the step of a layout.
        calibration: what accelerators and networks reach of their published rates.
        keep: ways to train whose fastest layout is returned.

    Raises:
        UserError: a peak is not known.
    """
    refused: Counter[str] = Counter()
    bounds = Bounds(request, calibration)
    bounded = []
    for shape in shapes(request, refused):
        for each in fitting(request, shape, refused):
            bound = bounds.seconds(each.layout)
            if bound is None:
                refused[NOT_MEASURED] += 1
                continue
            bounded.append((bound, each.layout))
    bounded.sort(key=lambda pair: pair[0])
    table = _Fastest(keep, any(layout.is_trainable for _, layout in bounded))

    def fits(layout: LayoutCandidate) -> bool:
        return least_room(request, layout).fits or fits_in_parts(request, layout)

    timed, simulated = 0, Counter[object]()
    remaining = collections.deque(bounded)
    left_out = list[float]()
    while remaining and remaining[0][0] < table.slowest:
        bound, layout = remaining.popleft()
        way = layout.dc.role, layout.dc.join
        enough = simulated.total() >= MOST_SIMULATED and simulated[way] >= LEAST_OF_ROLE
        if enough and _pairs(layout):
            left_out.append(bound)
            continue
        timed += 1
        dealt = in_proportion(request, layout, bounds.works)
        if dealt is None:
            refused["memory"] += 1
            continue
        simulated[way] += _pairs(dealt)
        with contextlib.suppress(UserError):  # a schedule that cannot be made within its limit
            table.add(Candidate(dealt, least_room(request, dealt).memory, timer(dealt)))
    left_out += [bound for bound, _ in remaining]
    pairs = 0
    for candidate in table.to_vary:
        for varied in variations(request, candidate.layout, fits):
            pairs += _pairs(varied)
            if pairs > MOST_VARIED:
                continue
            dealt = in_proportion(request, varied, bounds.works)
            if dealt is None:
                continue
            timed += 1
            with contextlib.suppress(UserError):
                table.add(Candidate(dealt, least_room(request, dealt).memory, timer(dealt)))
    best = tuple(_as_timed(request, each) for each in table.best)
    return SearchResult(best, refused, len(bounded), timed, min(left_out, default=None))


def _as_timed(request: PlanRequest, candidate: Candidate) -> Candidate:
    """Settle the layers and buckets of a layout that fits with them, so that no run chooses others.

    A run chooses by the cost model too, but knows no calibration.
    """
    layout = candidate.prediction.layout
    room = least_room(request, layout)
    if not room.fits:
        return candidate
    return dataclasses.replace(candidate, layout=layout, memory=room.memory)


def _pairs(layout: LayoutCandidate) -> int:
    """Count the (microbatch, chunk) pairs of a pipeline, by which its simulation takes long."""
    if layout.pipeline_stages == 1:
        return 0
    return layout.batch.microbatches * layout.pipeline_stages * layout.pipeline.virtual_stages


class _Fastest:
    """The fastest layout of each way to train."""

    def __init__(self, keep: int, some_trainable: bool):
        self._keep, self._some_trainable = keep, some_trainable
        self._by_way: dict[object, Candidate] = {}

    def add(self, candidate: Candidate) -> None:
        """Take a layout if it is the fastest of its way."""
        layout = candidate.layout
        schedule = layout.pipeline.schedule if layout.pipeline_stages > 1 else None
        sizes = tuple(layout.mesh_sizes.values())
        way = layout.dc.role, layout.dc.join, layout.is_trainable, sizes, schedule
        if way not in self._by_way or candidate.seconds < self._by_way[way].seconds:
            self._by_way[way] = candidate

    @property
    def best(self) -> tuple[Candidate, ...]:
        """Return as many as are kept, fastest first, and one that can be trained."""
        kept, others = self._ordered[: self._keep], self._ordered[self._keep :]
        if not any(each.layout.is_trainable for each in kept):
            kept += [each for each in others if each.layout.is_trainable][:1]
        return tuple(kept)

    @property
    def to_vary(self) -> list[Candidate]:
        """List the fastest layouts, and the fastest pipeline of each role and way to join."""
        ordered = self._ordered
        piped: dict[object, Candidate] = {}
        for each in ordered:
            if each.layout.pipeline_stages > 1:
                piped.setdefault((each.layout.dc.role, each.layout.dc.join), each)
        return list(dict.fromkeys([*ordered[:VARIED], *piped.values()]))

    @property
    def slowest(self) -> float:
        """Return the time that a layout has to be below to be kept."""
        best = self.best
        trains = any(each.layout.is_trainable for each in best) or not self._some_trainable
        return best[-1].seconds if len(best) >= self._keep and trains else math.inf

    @property
    def _ordered(self) -> list[Candidate]:
        return sorted(self._by_way.values(), key=lambda each: each.seconds)
