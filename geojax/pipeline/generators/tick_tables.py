"""The table of ticks of every schedule by name: what the executor of one program runs."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from geojax.errors import UserError
from geojax.pipeline.costs import Costs, Hop
from geojax.pipeline.generators.greedy import greedy
from geojax.pipeline.generators.latency_hiding import limit_spreads
from geojax.pipeline.generators.paired import paired_greedy, paired_interleaved
from geojax.pipeline.generators.warmup import with_warmups
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2
from geojax.pipeline.generators.zero_bubble_v import zbv
from geojax.pipeline.lock_step import lock_step_seconds
from geojax.pipeline.schedule import Placement, Schedule, TickTable
from geojax.pipeline.ticks import in_ticks

TICK_SCHEDULES = (
    "branch_free",
    "gpipe",
    "one_f_one_b",
    "extended_warmup",
    "interleaved",
    "zero_bubble_h1",
    "zero_bubble_h2",
    "zbv",
    "latency_hiding",
)
"""The names that `tick_table` takes."""


_ROOM = (1.0, 1.25, 1.5, 2.0, 3.0)
"""What `best_tick_table` multiplies a hop's ticks with."""


def tick_table(
    name: str,
    placement: Placement,
    microbatches: int,
    hop_ticks: Sequence[int],
    limit: int | None = None,
    *,
    costs: Costs | None = None,
    split_backward: bool = False,
) -> TickTable:
    """The schedule of that name in ticks.

    branch_free
        Stage s runs the forward of microbatch i in tick i + (hop ticks before s), the last stage
        its backward in the same tick, the stages before it each its hops later: ticks of forwards,
        of both, of backwards. In all m + 2 sum(hop ticks), and (m + sum(hop ticks))(f + b) seconds.
    gpipe, one_f_one_b, extended_warmup, latency_hiding
        One chunk a stage. one_f_one_b runs ahead as if every hop took one tick, extended_warmup by
        what they do take; both, and latency_hiding, in the kind of ticks, paired or single, that
        takes less time within the limit.
    interleaved
        Paired ticks, chunks as in `Placement.interleaved`.
    zero_bubble_h1, zero_bubble_h2, zbv
        Single ticks with split backwards; zbv with the chunks of `Placement.vee`.

    `hop_ticks` has one entry for each chunk and its successor; `limit` is the most (microbatch,
    chunk) pairs that a stage may hold. `costs` are what candidates are timed with: by default a
    backward takes twice a forward. `split_backward` is for latency_hiding: whether the gradients of
    weights are actions of their own.

    Raises:
        UserError: no schedule has that name, the placement is not one that it can have, or it
            cannot keep within the limit.
    """
    if len(hop_ticks) != placement.chunks - 1 or min(hop_ticks, default=1) < 1:
        raise UserError(
            f"hop_ticks {tuple(hop_ticks)} do not fit {placement.chunks} chunks: there is one "
            "number for each chunk and its successor, at least 1"
        )
    if split_backward and name != "latency_hiding":
        raise UserError(f"split_backward is for latency_hiding; '{name}' says itself what it does")
    if costs is None:
        costs = Costs.uniform(placement.chunks, 1.0, 1.0, 1.0)
    tables = list(_tables(name, placement, microbatches, hop_ticks, limit, costs, split_backward))
    least = min(max(table.schedule.in_flight) for table in tables)
    if limit is not None:
        tables = [table for table in tables if max(table.schedule.in_flight) <= limit]
    if not tables:
        raise UserError(
            f"the schedule '{name}' holds {least} microbatches' chunks on a stage where the limit "
            f"is {limit}: latency_hiding keeps within any limit"
        )
    best = min(tables, key=lambda table: lock_step_seconds(table, costs))
    return dataclasses.replace(best, schedule=dataclasses.replace(best.schedule, name=name))


def best_tick_table(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: int | None = None,
    *,
    split_backward: bool = False,
) -> TickTable:
    """The table of that name with the hop ticks that make it fastest in lock-step.

    In the steady state a message has the hop's ticks less one, of f + b each, to travel in; but
    before the first backward ticks last f, after the last forward b. So a hop may do well with more
    ticks than its seconds fill in the steady state, for more microbatches in flight.

    Raises:
        UserError: as `tick_table`.
    """
    period = max(map(sum, zip(costs.forward, costs.backward, costs.weight, strict=True)))
    chosen = []
    for room in _ROOM:
        ticks = tuple(
            1 + math.ceil(room * hop.seconds / period * (1 - 1e-12)) for hop in costs.hops
        )
        if ticks not in chosen:
            chosen.append(ticks)
    tables = []
    for ticks in chosen:
        try:
            tables.append(
                tick_table(
                    name,
                    placement,
                    microbatches,
                    ticks,
                    limit,
                    costs=costs,
                    split_backward=split_backward,
                )
            )
        except UserError:
            if not tables:  # the fewest ticks hold least
                raise
    return min(tables, key=lambda table: lock_step_seconds(table, costs))


def _tables(
    name: str,
    placement: Placement,
    microbatches: int,
    hop_ticks: Sequence[int],
    limit: int | None,
    costs: Costs,
    split_backward: bool,
) -> Iterator[TickTable]:
    stages, chunks = placement.stages, placement.chunks
    single, paired = [], []
    if name == "interleaved":
        paired = [paired_interleaved(placement, microbatches, hop_ticks)]
    elif name == "zbv":
        _require(name, placement, Placement.vee(stages))
        single = [zbv(stages, microbatches)]
    elif name in TICK_SCHEDULES:
        _require(name, placement, Placement.linear(stages))
        ones = [1] * (chunks - 1)
        cap = microbatches if limit is None else limit
        if name == "branch_free":
            paired = [_ahead(2, hop_ticks, microbatches, microbatches)]
        elif name == "gpipe":
            paired = [with_warmups(name, [microbatches] * stages, microbatches)]
        elif name == "one_f_one_b":
            paired = [_ahead(2, ones, microbatches, cap)]
            single = [_ahead(1, ones, microbatches, cap)]
        elif name == "extended_warmup":
            paired = [_ahead(2, hop_ticks, microbatches, cap)]
            single = [_ahead(1, hop_ticks, microbatches, cap)]
        elif name == "zero_bubble_h1":
            single = [zero_bubble_h1(stages, microbatches)]
        elif name == "zero_bubble_h2":
            single = [zero_bubble_h2(stages, microbatches)]
        elif not split_backward:
            single = [_ahead(1, each, microbatches, cap) for each in (ones, hop_ticks)]
            single += _greedy(hop_ticks, microbatches, cap, False)
            paired = [_ahead(2, each, microbatches, cap) for each in (ones, hop_ticks)]
            paired += [
                paired_greedy(microbatches, hop_ticks, limits)
                for limits in limit_spreads(_unit_costs(hop_ticks, 0.0), cap)
            ]
        else:
            single = [zero_bubble_h1(stages, microbatches), zero_bubble_h2(stages, microbatches)]
            single += _greedy(hop_ticks, microbatches, cap, True)
    else:
        raise UserError(f"no schedule is called '{name}': take one of {', '.join(TICK_SCHEDULES)}")
    yield from (in_ticks(schedule, hop_ticks, paired=True) for schedule in paired)
    yield from (in_ticks(schedule, hop_ticks, paired=False) for schedule in single)


def _require(name: str, placement: Placement, wanted: Placement) -> None:
    if placement != wanted:
        raise UserError(
            f"the schedule '{name}' puts its chunks on the stages "
            f"{', '.join(map(str, wanted.stage_of))}, not on "
            f"{', '.join(map(str, placement.stage_of))}"
        )


def _ahead(factor: int, hop_ticks: Sequence[int], microbatches: int, cap: int) -> Schedule:
    """Forwards first for the ticks to the last stage, or to it and back."""
    warmups = [min(factor * sum(hop_ticks[stage:]), cap - 1) for stage in range(len(hop_ticks) + 1)]
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
