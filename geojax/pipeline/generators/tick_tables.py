"""The table of ticks of every schedule by name: what the executor of one program runs."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from geojax.errors import UserError
from geojax.pipeline.generators.tick_orders import splits_backward, tick_orders
from geojax.pipeline.schedule import Placement, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step_seconds
from geojax.pipeline.ticks import Packing, in_ticks

_SLIGHT = 1e-9
"""What rounding left over a whole number of ticks, or took from it, is no reason for another."""

_SHARES = (0.6, 0.8, 1.0)
"""Of the ticks that a hop would fill, those that tables of single actions leave it."""

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
    split_backward: bool = False,
) -> TickTable:
    """The schedule of that name in ticks.

    branch_free
        Stage s runs the forward of microbatch i in tick i + (hop ticks before s), the last stage
        its backward in the same tick, the stages before it each its hops later: ticks of forwards,
        of both, of backwards. In all m + 2 sum(hop ticks), and (m + sum(hop ticks))(f + b) seconds.
    gpipe, 1f1b, geopipe, latency_hiding
        One chunk a stage. 1f1b runs ahead as if every hop took one tick, geopipe by
        what they do take.
    interleaved
        A forward and a backward of a chunk a tick, chunks as in `Placement.interleaved`.
    zero_bubble_h1, zero_bubble_h2, zbv
        Backwards are split; zbv with the chunks of `Placement.vee`.

    Of the packings (`geojax.pipeline.ticks`) it has the one that takes least time within the limit.
    Where backwards are not split, a tick is never one of kinds in turn: a hop of two ticks then has
    half of the time to travel in, which only `best_tick_table` can weigh.

    `hop_ticks` has one entry for each chunk and its successor, the same there and back; `limit` is
    the most (microbatch, chunk) pairs that a stage may hold. `costs` are what candidates are timed
    with: by default a backward takes twice a forward. `split_backward` is for latency_hiding:
    whether the gradients of weights are actions of their own.

    Raises:
        UserError: no schedule has that name, the placement is not one that it can have, or it
            cannot keep within the limit.
    """
    if len(hop_ticks) != placement.chunks - 1 or min(hop_ticks, default=1) < 1:
        raise UserError(
            f"hop_ticks {tuple(hop_ticks)} do not fit {placement.chunks} chunks: there is one "
            "number for each chunk and its successor, at least 1"
        )
    split = splits_backward(name, split_backward)
    packings = [Packing.TOGETHER, Packing.SINGLE]
    if split:
        packings = [Packing.SINGLE, Packing.TOGETHER, Packing.IN_TURN]
    both = (tuple(hop_ticks), tuple(hop_ticks))
    if costs is None:
        costs = Costs.uniform(placement.chunks, 1.0, 1.0, 1.0)
    return _best(name, placement, microbatches, limit, costs, split, packings, lambda _: [both])


def best_tick_table(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: int | None = None,
    *,
    split_backward: bool = False,
) -> TickTable:
    """The table of that name with the packing and the hop ticks that make it fastest in lock-step.

    In the steady state a message has the ticks of its hop but one, of f + b together, to travel in;
    but before the first backward ticks last f, after the last forward b. So a hop may do well with
    more ticks than its seconds fill in the steady state, for more microbatches in flight, and not
    with as many back as there.

    Raises:
        UserError: as `tick_table`.
    """
    split = splits_backward(name, split_backward)

    def hop_ticks(packing: Packing) -> list[_HopTicks]:
        return _hop_ticks(packing, costs, split)

    return _best(name, placement, microbatches, limit, costs, split, list(Packing), hop_ticks)


def _best(
    name: str,
    placement: Placement,
    microbatches: int,
    limit: int | None,
    costs: Costs,
    split: bool,
    packings: Sequence[Packing],
    hop_ticks: Callable[[Packing], Sequence[_HopTicks]],
) -> TickTable:
    def tables() -> Iterator[TickTable]:
        for packing in packings:
            if name == "branch_free" and packing is not Packing.TOGETHER:
                continue
            for number, (there, back) in enumerate(hop_ticks(packing)):
                try:
                    orders = tick_orders(
                        name, placement, microbatches, packing, there, back, limit, split=split
                    )
                except UserError:
                    if number == 0:  # the fewest ticks ask for least
                        raise
                    continue
                for schedule in dict.fromkeys(orders):
                    held.append(max(schedule.in_flight))
                    if limit is None or held[-1] <= limit:
                        yield in_ticks(schedule, there, back, packing)

    held: list[int] = []
    best = min(tables(), key=lambda table: lock_step_seconds(table, costs), default=None)
    if best is None:
        assert limit is not None, "without a limit nothing holds too much"
        raise UserError(_too_much(name, placement, min(held), limit))
    return dataclasses.replace(best, schedule=dataclasses.replace(best.schedule, name=name))


def _too_much(name: str, placement: Placement, least: int, limit: int) -> str:
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
    work = max(map(sum, zip(costs.forward, costs.backward, costs.weight, strict=True)))
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
