"""Tick tables: any schedule by name, as the executor of one program runs it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from geojax.errors import UserError
from geojax.pipeline.generators.tick_orders import TickRequest
from geojax.pipeline.orders import ORDERS
from geojax.pipeline.registry import ScheduleEntry, schedule_entry
from geojax.pipeline.schedule import Placement, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step_seconds
from geojax.pipeline.ticks import Packing, in_ticks

_SLIGHT = 1e-9
"""The part of a tick that rounding may leave over a whole number, or take from it."""

_SHARES = (0.6, 0.8, 1.0)
"""The shares of the ticks of a hop that tables of single actions leave it."""

_HopTicks = tuple[tuple[int, ...], tuple[int, ...]]
"""Towards later chunks, and back."""


def tick_table(
    name: str,
    placement: Placement,
    microbatches: int,
    hop_ticks: Sequence[int],
    limit: int | None = None,
    *,
    costs: Costs | None = None,
) -> TickTable:
    """Return the schedule `name` in ticks.

    Of the packings (`geojax.pipeline.ticks`) it has the one that takes least time within the limit.
    Where backwards are not split, a tick is never one of kinds in turn: a hop of two ticks then has
    half of the time to travel in, which only `best_tick_table` can weigh.

    With `branch_free` stage s runs the forward of microbatch i in tick i + (hop ticks before s),
    the last stage its backward in the same tick, the stages before it each its hops later. In all
    that is m + 2 sum(hop ticks) ticks, and (m + sum(hop ticks))(f + b) seconds.

    Args:
        name: of an entry in `geojax.pipeline.registry`.
        placement: the stage of each chunk, as that entry places them.
        microbatches: the number of them.
        hop_ticks: one number for each chunk and its successor, the same there and back.
        limit: the most (microbatch, chunk) pairs that a stage may hold.
        costs: the seconds that candidates are timed with; None: a backward takes twice a forward.

    Raises:
        UserError: no schedule has that name, the placement is not one that it can have, or it
            cannot keep within the limit.
    """
    if costs is None:
        costs = Costs.uniform(placement.chunks, 1.0, 1.0, 1.0)
    return fastest(candidate_tables(name, placement, microbatches, hop_ticks, limit), costs)


def candidate_tables(
    name: str,
    placement: Placement,
    microbatches: int,
    hop_ticks: Sequence[int],
    limit: int | None = None,
) -> Iterator[TickTable]:
    """Yield the tables of which `tick_table` returns the fastest; arguments and errors as there."""
    if len(hop_ticks) != placement.chunks - 1 or min(hop_ticks, default=1) < 1:
        raise UserError(
            f"hop_ticks {tuple(hop_ticks)} do not fit {placement.chunks} chunks: there is one "
            "number for each chunk and its successor, at least 1"
        )
    entry = schedule_entry(name)
    packings = [Packing.TOGETHER, Packing.SINGLE]
    if entry.split_backward:
        packings = [Packing.SINGLE, Packing.TOGETHER, Packing.IN_TURN]
    both = (tuple(hop_ticks), tuple(hop_ticks))
    return _candidates(entry, placement, microbatches, limit, packings, lambda _: [both])


def near_or_delayed(table: Callable[[int], TickTable], costs: Costs) -> TickTable:
    """Return the faster of the tables whose hops between sites take one tick, or two.

    A message travels in the tick after the one that made it, or between two ticks. The program has
    one on its way over each hop, so that more than two ticks gain nothing.

    Args:
        table: makes the table for so many ticks.
        costs: times of a microbatch, whose hops between sites have links.

    Raises:
        UserError: not even one tick can be within the memory limit.
    """
    near = table(1)
    if all(hop.link is None for hop in costs.hops):
        return near
    try:
        delayed = table(2)
    except UserError:  # it holds more microbatches than the limit allows
        return near
    return fastest((near, delayed), costs)


def fastest(tables: Iterable[TickTable], costs: Costs) -> TickTable:
    """Return the table that takes least time in lock-step, the first of several that do."""
    return min(tables, key=lambda table: lock_step_seconds(table, costs))


def best_tick_table(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: int | None = None,
) -> TickTable:
    """Return the table of `name` with the packing and hop ticks that are fastest in lock-step.

    In the steady state a message has the ticks of its hop but one, of f + b together, to travel in;
    but before the first backward ticks last f, after the last forward b. So a hop may do well with
    more ticks than its seconds fill in the steady state, for more microbatches in flight, and not
    with as many back as there.

    Raises:
        UserError: as `tick_table`.
    """
    entry = schedule_entry(name)

    def hop_ticks(packing: Packing) -> list[_HopTicks]:
        return _hop_ticks(packing, costs, entry.split_backward)

    packings = list(Packing)
    return fastest(_candidates(entry, placement, microbatches, limit, packings, hop_ticks), costs)


def hops_between_sites(
    placement: Placement, stages_per_site: int, hop_ticks: int
) -> tuple[int, ...]:
    """Return the ticks of each chunk's hop: `hop_ticks` between sites, one inside a site."""
    sites = [stage // stages_per_site for stage in placement.stage_of]
    return tuple(
        1 if site == next_site else hop_ticks for site, next_site in itertools.pairwise(sites)
    )


def _candidates(
    entry: ScheduleEntry,
    placement: Placement,
    microbatches: int,
    limit: int | None,
    packings: Sequence[Packing],
    hop_ticks: Callable[[Packing], Sequence[_HopTicks]],
) -> Iterator[TickTable]:
    _require_placement(entry, placement)
    held = []
    for packing in packings:
        if entry.branch_free and packing is not Packing.TOGETHER:
            continue
        for number, (there, back) in enumerate(hop_ticks(packing)):
            request = TickRequest(
                placement, microbatches, packing, there, back, limit, entry.split_backward
            )
            try:
                orders = ORDERS[entry.name].in_ticks(request)
            except UserError:
                if number == 0:  # the fewest ticks ask for least
                    raise
                continue
            for schedule in dict.fromkeys(orders):
                held.append(max(schedule.in_flight))
                if limit is None or held[-1] <= limit:
                    named = dataclasses.replace(schedule, name=entry.name)
                    yield in_ticks(named, there, back, packing)
    if limit is not None and min(held) > limit:
        raise UserError(too_much_held(entry.name, placement, min(held), limit))


def _require_placement(entry: ScheduleEntry, placement: Placement) -> None:
    if entry.virtual_stages is None:
        return  # it depends on the sites; the generator checks it
    wanted = entry.placement((placement.stages,), entry.virtual_stages)
    if placement != wanted:
        raise UserError(
            f"the schedule '{entry.name}' puts its chunks on the stages "
            f"{', '.join(map(str, wanted.stage_of))}, not on "
            f"{', '.join(map(str, placement.stage_of))}"
        )


def too_much_held(name: str, placement: Placement, least: int, limit: int) -> str:
    """Say that a schedule cannot keep within a limit of (microbatch, chunk) pairs."""
    chunks = placement.chunks_per_stage
    whole = -(-least // chunks)

    def amount(pairs: int) -> str:
        if chunks == 1:
            return f"{pairs} microbatches"
        return f"{pairs / chunks:g} microbatches ({pairs} of its {chunks} chunks each)"

    return (
        f"the schedule '{name}' holds {amount(least)} on a stage where the limit is "
        f"{amount(limit)}: the least that works is {amount(whole * chunks)}; latency_hiding keeps "
        "within any limit"
    )


def _hop_ticks(packing: Packing, costs: Costs, split: bool) -> list[_HopTicks]:
    """Ticks that may do well for the hops of `costs`; inside a site a message travels between two.

    Of single actions, what a hop needs if all ticks were as long as the longest, or less: where
    memory is short ticks are few, and to wait for a message costs less than a tick for it. Of the
    other packings, what it needs in the steady state, or more: what it needs where only forwards
    (only backwards, on the way back) are left, rounded down or up.
    """
    forward, weight = max(costs.forward), max(costs.weight)
    backward = max(map(sum, zip(costs.backward, costs.weight, strict=True)))
    work = max(costs.work)
    if split:
        backward = max(costs.backward)
    longest = max(forward, backward, weight if split else 0.0)
    in_turn = packing is Packing.IN_TURN  # the ticks of the other kinds hide a part of every hop
    ticks_of_round = (3 if split else 2) if in_turn else 1

    def of_hops(ticks: Callable[[float], int]) -> tuple[int, ...]:
        return tuple(1 if hop.link is None else ticks(hop.seconds) for hop in costs.hops)

    def shared(share: float) -> tuple[int, ...]:
        return of_hops(lambda seconds: 1 + _round_up(share * seconds / longest))

    def for_ramps(alone: float, rounding: Callable[[float], int]) -> tuple[int, ...]:
        hidden = work - alone if in_turn else 0.0

        def ticks(seconds: float) -> int:
            steady = _round_up((seconds - hidden) / work)
            return ticks_of_round * (1 + max(0, steady, rounding(seconds / alone)))

        return of_hops(ticks)

    near = of_hops(lambda _: 1)
    choices = [(near, near)]
    if packing is Packing.SINGLE:
        for share in _SHARES:
            choices.append((shared(share), shared(share)))
    else:
        for rounding in (lambda _: 0, _round_down, _round_up):
            choices.append((for_ramps(forward, rounding), for_ramps(backward, rounding)))
    return list(dict.fromkeys(choices))


def _round_up(ticks: float) -> int:
    return math.ceil(ticks - _SLIGHT)


def _round_down(ticks: float) -> int:
    return math.floor(ticks + _SLIGHT)
