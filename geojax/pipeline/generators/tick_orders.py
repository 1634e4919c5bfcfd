"""The orders that tables of ticks are made of, for each name of a schedule."""

from collections.abc import Sequence

from geojax.errors import UserError
from geojax.pipeline.generators.greedy import greedy
from geojax.pipeline.generators.latency_hiding import limit_spreads, with_split_backward
from geojax.pipeline.generators.paired import paired_greedy, paired_interleaved
from geojax.pipeline.generators.warmup import with_warmups
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2
from geojax.pipeline.generators.zero_bubble_v import zbv
from geojax.pipeline.schedule import Placement, Schedule
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.ticks import Packing

TICK_SCHEDULES = (
    "branch_free",
    "gpipe",
    "1f1b",
    "geopipe",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zbv",
    "latency_hiding",
)
"""The names that `tick_table` takes."""

_SPLIT = ("zero_bubble_h1", "zero_bubble_h2", "zbv")


def splits_backward(name: str, asked: bool) -> bool:
    """Whether the schedule of that name splits backwards, as latency_hiding does where asked to.

    Raises:
        UserError: no schedule has that name, or it is asked of another one.
    """
    if name not in TICK_SCHEDULES:
        raise UserError(f"no schedule is called '{name}': take one of {', '.join(TICK_SCHEDULES)}")
    if asked and name != "latency_hiding":
        raise UserError(f"split_backward is for latency_hiding; '{name}' says itself what it does")
    return asked or name in _SPLIT


def tick_orders(
    name: str,
    placement: Placement,
    microbatches: int,
    packing: Packing,
    hop_ticks: Sequence[int],
    return_ticks: Sequence[int],
    limit: int | None,
    *,
    split: bool,
) -> list[Schedule]:
    """The orders of that name that may do well in ticks of one packing; some hold too much.

    Arguments are those of `tick_table`.

    Raises:
        UserError: the placement is not one that the schedule can have, or the microbatches are too
            few for it.
    """
    stages = placement.stages
    if name == "zbv":
        _require(name, placement, Placement.vee(stages))
    elif name != "interleaved":
        _require(name, placement, Placement.linear(stages))
    cap = microbatches if limit is None else limit
    rounds = _Rounds(packing, 3 if split else 2)
    there, back = (rounds.of(ticks) for ticks in (hop_ticks, return_ticks))
    ones = [1] * len(there)
    run_ahead = _ahead(rounds, hop_ticks, return_ticks, microbatches, cap)
    as_if_near = _ahead(rounds, ones, ones, microbatches, cap)
    match name:
        case "interleaved":
            return [paired_interleaved(placement, microbatches, list(map(max, there, back)))]
        case "zbv":
            return [zbv(stages, microbatches)]
        case "zero_bubble_h1":
            return [zero_bubble_h1(stages, microbatches)]
        case "zero_bubble_h2":
            return [zero_bubble_h2(stages, microbatches)]
        case "gpipe":
            return [with_warmups(name, [microbatches] * stages, microbatches)]
        case "branch_free":
            return [_ahead(rounds, hop_ticks, return_ticks, microbatches, microbatches)]
        case "1f1b":
            return [as_if_near]
        case "geopipe":
            return [run_ahead]
    if packing is Packing.SINGLE:
        found = _greedy(hop_ticks, microbatches, cap, split)
    elif split:
        found = []
    else:
        spreads = limit_spreads(_unit_costs(there, 0.0), cap)
        found = [paired_greedy(microbatches, there, back, limits) for limits in spreads]
    if not split:
        return [as_if_near, run_ahead, *found]
    handmade = [zero_bubble_h1(stages, microbatches), zero_bubble_h2(stages, microbatches)]
    return [*handmade, with_split_backward(run_ahead), *found]


class _Rounds:
    """A round is what passes one microbatch: a tick, or as many as there are kinds."""

    def __init__(self, packing: Packing, kinds: int) -> None:
        self._ticks = 1 if packing is Packing.TOGETHER else kinds
        self._single = packing is Packing.SINGLE

    def of(self, ticks: Sequence[int]) -> list[int]:
        """The rounds from an action to the next stage's, over each hop; at least one each."""
        return [-(-count // self._ticks) for count in ticks]

    def there_and_back(self, hop_ticks: Sequence[int], return_ticks: Sequence[int]) -> list[int]:
        """For each hop, the microbatches that pass while a message and its answer cross it."""
        if self._single:  # forwards and backwards wait for no turn of theirs
            pairs = zip(hop_ticks, return_ticks, strict=True)
            return [-(-(there + back) // 2) for there, back in pairs]
        pairs = zip(self.of(hop_ticks), self.of(return_ticks), strict=True)
        return [there + back for there, back in pairs]


def _require(name: str, placement: Placement, wanted: Placement) -> None:
    if placement != wanted:
        raise UserError(
            f"the schedule '{name}' puts its chunks on the stages "
            f"{', '.join(map(str, wanted.stage_of))}, not on "
            f"{', '.join(map(str, placement.stage_of))}"
        )


def _ahead(
    rounds: _Rounds,
    hop_ticks: Sequence[int],
    return_ticks: Sequence[int],
    microbatches: int,
    cap: int,
) -> Schedule:
    """Forwards first for as long as a message takes to the last stage and back."""
    away = rounds.there_and_back(hop_ticks, return_ticks)
    warmups = [min(sum(away[stage:]), cap - 1) for stage in range(len(away) + 1)]
    return with_warmups("ahead", warmups, microbatches)


def _unit_costs(hop_ticks: Sequence[int], weight: float) -> Costs:
    """One tick for each action; a hop's first tick is the one that made the message."""
    actions = (1.0,) * (len(hop_ticks) + 1)
    hops = tuple(Hop(ticks - 1.0) for ticks in hop_ticks)
    return Costs(actions, actions, (weight,) * len(actions), hops)


def _greedy(
    hop_ticks: Sequence[int], microbatches: int, cap: int, split_backward: bool
) -> list[Schedule]:
    costs = _unit_costs(hop_ticks, 1.0 if split_backward else 0.0)
    return [
        greedy(microbatches, costs, limits, split_backward=split_backward)
        for limits in limit_spreads(costs, cap)
    ]
