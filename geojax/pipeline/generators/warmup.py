"""Schedules that differ in one thing: how many forwards a stage runs before its first backward.

    gpipe              all of them
    1f1b               one for each stage behind it
    geopipe            as many more as the messages of a round trip over a slow cut take

All orders are strict: after the warm-up forwards and backwards alternate.
"""

import itertools
import math
from collections.abc import Sequence

from geojax.pipeline.schedule import Action, Kind, Placement, Schedule
from geojax.pipeline.simulation.costs import Costs


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019).

    Every stage holds all microbatches.
    """
    return with_warmups("gpipe", [microbatches] * stages, microbatches)


def one_forward_one_backward(stages: int, microbatches: int) -> Schedule:
    """One forward for each stage behind, then forwards and backwards in turn (PipeDream-Flush).

    The first stage holds as many microbatches as there are stages (Narayanan et al., 2021, section
    2.2.1).
    """
    return with_warmups("1f1b", list(range(stages))[::-1], microbatches)


def geopipe(microbatches: int, costs: Costs, limit: int | None = None) -> Schedule:
    """GeoPipe: more forwards before the first backward upstream of every slow hop.

    A hop of H seconds keeps a microbatch away for 2 H longer, enough time for 2 H / (f + b) other
    microbatches. All stages before the hop therefore run so many more forwards first (rounded up).
    Several hops behind a stage add up. Iteration time is then (m + p - 1)(f + b) + 2 sum H, the
    least that is possible where a backward is not split.

    `costs` are those of one chunk a stage; of unequal ones the slowest counts. `limit` caps what a
    stage holds. Where it allows fewer forwards than that, they are spread so that a microbatch
    takes least time in the steady state. No stage runs as many forwards as its neighbor without
    need, since the two would then work in turns.
    """
    assert limit is None or limit >= 1, "a stage holds one microbatch at least"
    period = max(
        forward + backward + weight
        for forward, backward, weight in zip(
            costs.forward, costs.backward, costs.weight, strict=True
        )
    )
    # What rounding left over a whole number of periods is no reason for one more.
    more = [math.ceil(2 * hop.seconds / period * (1 - 1e-12)) for hop in costs.hops]
    behind = itertools.accumulate([0] + [1 + extra for extra in more[::-1]])
    warmups = list(behind)[::-1]
    if limit is not None and warmups[0] >= limit:
        ways = [period + 2 * hop.seconds for hop in costs.hops]
        spreads = _capped(warmups, ways, limit)
        warmups = min(spreads, key=lambda spread: _steady_period(spread, ways, period))
    return with_warmups("geopipe", warmups, microbatches)


def _capped(warmups: Sequence[int], ways: Sequence[float], limit: int) -> list[list[int]]:
    """Spread fewer forwards than `warmups` over the stages: cut off; by the seconds of the way
    behind a stage, of which each hop and its stage are one of `ways`; and as 1F1B, with the rest
    before the slowest hop."""
    most, last = limit - 1, len(ways)
    behind = [sum(ways[stage:]) for stage in range(last + 1)]
    rest, slowest = max(0, most - last), max(range(last), key=lambda hop: ways[hop])
    return [
        [min(count, most) for count in warmups],
        [math.ceil(most * way / behind[0] * (1 - 1e-12)) for way in behind],
        [min(most, last - stage + (rest if stage <= slowest else 0)) for stage in range(last + 1)],
    ]


def _steady_period(warmups: Sequence[int], ways: Sequence[float], period: float) -> float:
    """Seconds of a microbatch in the steady state of strict orders: on some run of neighboring
    stages, the time of a round trip is shared by the microbatches between its ends."""
    longest = period
    for first in range(len(ways)):
        way = 0.0
        for end in range(first, len(ways)):
            way += ways[end]
            longest = max(longest, (way + period) / (1 + warmups[first] - warmups[end + 1]))
    return longest


def with_warmups(name: str, warmups: Sequence[int], microbatches: int) -> Schedule:
    """One chunk a stage; each runs its number of forwards, then one more and a backward in turn."""
    orders = []
    for stage, warmup in enumerate(warmups):
        first = min(warmup, microbatches)
        order = [Action(Kind.FORWARD, i, stage) for i in range(first)]
        for i in range(first, microbatches):
            order.append(Action(Kind.FORWARD, i, stage))
            order.append(Action(Kind.BACKWARD, i - first, stage))
        order += [
            Action(Kind.BACKWARD, i, stage) for i in range(microbatches - first, microbatches)
        ]
        orders.append(tuple(order))
    return Schedule(name, Placement.linear(len(warmups)), microbatches, False, tuple(orders))
