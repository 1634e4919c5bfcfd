"""Orders for stages that work in lock-step, in the units of their ticks."""

import dataclasses
from collections.abc import Sequence

from geojax.pipeline.generators.greedy import greedy
from geojax.pipeline.generators.latency_hiding import limit_spreads, with_split_backward
from geojax.pipeline.generators.paired import paired_greedy, paired_interleaved
from geojax.pipeline.generators.warmup import with_warmups
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2
from geojax.pipeline.schedule import MemoryLimit, Placement, Schedule
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.ticks import Packing


@dataclasses.dataclass(frozen=True)
class TickRequest:
    """A pipeline whose stages work in lock-step, in ticks of one packing.

    A round is the time that passes one microbatch: a tick, or as many ticks as there are kinds.
    """

    placement: Placement
    microbatches: int
    packing: Packing
    hop_ticks: tuple[int, ...]
    """The ticks of a message to each chunk's successor."""

    return_ticks: tuple[int, ...]
    """The ticks of a message back from each chunk's successor."""

    limit: int | None
    """The most (microbatch, chunk) pairs that a stage may hold; None: any number."""

    split_backward: bool

    @property
    def most_in_flight(self) -> int:
        """The most microbatches that a stage may hold, in numbers."""
        return self.microbatches if self.limit is None else self.limit

    @property
    def hop_rounds(self) -> list[int]:
        """Rounds from a forward to the next stage's, over each hop; at least one each."""
        return self._rounds(self.hop_ticks)

    @property
    def return_rounds(self) -> list[int]:
        """Rounds from a backward to the previous stage's, over each hop; at least one each."""
        return self._rounds(self.return_ticks)

    def round_trips(self) -> list[int]:
        """Count for each hop the microbatches that pass while a message and its answer cross it."""
        if self.packing is Packing.SINGLE:  # forwards and backwards wait for no turn of theirs
            pairs = zip(self.hop_ticks, self.return_ticks, strict=True)
            return [-(-(there + back) // 2) for there, back in pairs]
        return list(map(sum, zip(self.hop_rounds, self.return_rounds, strict=True)))

    def _rounds(self, ticks: Sequence[int]) -> list[int]:
        kinds = 3 if self.split_backward else 2
        ticks_per_round = 1 if self.packing is Packing.TOGETHER else kinds
        return [-(-count // ticks_per_round) for count in ticks]


def branch_free(request: TickRequest) -> list[Schedule]:
    """Run forwards ahead for the whole round trip, whatever a stage then holds."""
    return [_ahead(dataclasses.replace(request, limit=None))]


def geopipe(request: TickRequest) -> list[Schedule]:
    """Run forwards ahead for the whole round trip, as far as memory allows."""
    return [_ahead(request)]


def one_forward_one_backward(request: TickRequest) -> list[Schedule]:
    """Run forwards ahead as if every hop took one tick."""
    ones = (1,) * len(request.hop_ticks)
    return [_ahead(dataclasses.replace(request, hop_ticks=ones, return_ticks=ones))]


def interleaved(request: TickRequest) -> list[Schedule]:
    """Run a forward and a backward of a chunk a tick, which need each other at the turn or not.

    Raises:
        UserError: the placement is not that of `Placement.interleaved`, or there are too few
            microbatches.
    """
    hop_rounds = list(map(max, request.hop_rounds, request.return_rounds))
    turns = (0, 1) if request.packing is Packing.TOGETHER else (0,)
    return [
        paired_interleaved(request.placement, request.microbatches, hop_rounds, turn=turn)
        for turn in turns
    ]


def latency_hiding(request: TickRequest) -> list[Schedule]:
    """Run ahead near and far, and greedily in many ways."""
    if request.packing is Packing.SINGLE:
        found = _greedy(request)
    else:
        there, back = request.hop_rounds, request.return_rounds
        most = (request.most_in_flight,) * request.placement.stages
        spreads = limit_spreads(_unit_costs(there, 0.0), most)
        found = [paired_greedy(request.microbatches, there, back, limits) for limits in spreads]
    return [*one_forward_one_backward(request), *geopipe(request), *found]


def latency_hiding_split(request: TickRequest) -> list[Schedule]:
    """Run as the zero-bubble schedules do, ahead, and greedily in many ways."""
    stages, microbatches = request.placement.stages, request.microbatches
    return [
        zero_bubble_h1(stages, microbatches),
        zero_bubble_h2(stages, microbatches),
        with_split_backward(_ahead(request)),
        *(_greedy(request) if request.packing is Packing.SINGLE else []),
    ]


def _ahead(request: TickRequest) -> Schedule:
    """Run forwards first for as long as a message takes to the last stage and back."""
    away, most = request.round_trips(), request.most_in_flight
    warmups = [min(sum(away[stage:]), most - 1) for stage in range(len(away) + 1)]
    return with_warmups("ahead", warmups, request.microbatches)


def _unit_costs(hop_ticks: Sequence[int], weight: float) -> Costs:
    """Return one tick for each action; a hop's first tick is the one that made the message."""
    actions = (1.0,) * (len(hop_ticks) + 1)
    hops = tuple(Hop(ticks - 1.0) for ticks in hop_ticks)
    return Costs(actions, actions, (weight,) * len(actions), hops)


def _greedy(request: TickRequest) -> list[Schedule]:
    split = request.split_backward
    costs = _unit_costs(request.hop_ticks, 1.0 if split else 0.0)
    memory = MemoryLimit.of_microbatches(request.most_in_flight, request.placement.stages)
    held = memory.held(split_backward=split)
    most = memory.most_in_flight(split_backward=split)
    orders = [
        greedy(request.microbatches, costs, held, limits, split_backward=split)
        for limits in limit_spreads(costs, most)
    ]
    return [order.schedule() for order in orders if order is not None]
