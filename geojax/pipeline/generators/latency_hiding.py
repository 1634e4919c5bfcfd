"""The best order for a memory limit, among many, by the simulator."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from geojax.errors import UserError
from geojax.pipeline.generators.greedy import (
    BACKWARD_FIRST,
    FORWARD_FIRST,
    GreedyOrder,
    greedy,
)
from geojax.pipeline.generators.warmup import geopipe, gpipe, one_forward_one_backward
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2
from geojax.pipeline.schedule import Kind, MemoryLimit, Schedule
from geojax.pipeline.simulation.bounds import least_seconds
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.simulator import iteration_seconds
from geojax.quantities import quantity

_PATIENCE = (0.0, 0.25, 0.5)
_LARGE = 2**15
"""Microbatches of all stages beyond which no stage waits: it gains little there, and takes long."""
_PREFERENCES = (BACKWARD_FIRST, FORWARD_FIRST)


def latency_hiding(
    microbatches: int, costs: Costs, limit: int | MemoryLimit, *, split_backward: bool = False
) -> Schedule:
    """Find the fastest schedule that keeps every stage within `limit`, in microbatches or bytes.

    Candidates are greedy orders and the fixed schedules that meet the limit; the simulator times
    each. Greedy orders differ in three choices: whether a stage prefers backwards or forwards, how
    the limit is spread over the stages, and how long a stage waits for a preferred action. Forwards
    first wins where stages are uneven and memory is tight. By Little's law no schedule passes more
    than `limit` microbatches in the time that one needs to go through all stages and back. m
    microbatches therefore take about (m - 1) max(f + b, (p (f + b) + 2 sum H) / limit) + p (f + b)
    + 2 sum H.

    `costs` are those of one chunk a stage. With `split_backward` the gradients of weights may be
    actions of their own; they are not where an order with whole backwards is faster.

    Raises:
        UserError: the limit is less than one microbatch.
    """
    if isinstance(limit, MemoryLimit):
        memory, amount = limit, lambda number: quantity(number, "B")
    else:
        memory = MemoryLimit.of_microbatches(limit, len(costs.forward))
        amount = "{} microbatches".format
    least = max(each.before_backward for each in memory.held(split_backward=False))
    if memory.limit < least:
        given, needed = amount(memory.limit), amount(least)
        raise UserError(f"a stage cannot hold {given} at most: the least limit is {needed}")
    best, seconds = None, math.inf
    for split in (True, False) if split_backward else (False,):
        if min(memory.most_in_flight(split_backward=split)) < 1:
            continue  # not even one backward in two halves
        for schedule in _fixed(microbatches, costs, memory, split_backward=split):
            found = iteration_seconds(schedule, costs)
            if found < seconds:
                best, seconds = schedule, found
        faster = _fastest_greedy(microbatches, costs, memory, seconds, split_backward=split)
        if faster is not None:
            best, seconds = faster.schedule(), faster.seconds
    assert best is not None, "a greedy order keeps within any limit"
    return dataclasses.replace(best, name="latency_hiding")


def _fixed(
    microbatches: int, costs: Costs, memory: MemoryLimit, *, split_backward: bool
) -> Iterator[Schedule]:
    """Generate the fixed schedules that keep within the limit."""
    stages = len(costs.forward)
    most = min(memory.most_in_flight(split_backward=split_backward))
    fixed = [one_forward_one_backward(stages, microbatches), geopipe(microbatches, costs, most)]
    if microbatches <= most:
        fixed.append(gpipe(stages, microbatches))
    if split_backward:
        fixed = [with_split_backward(schedule) for schedule in fixed]
        fixed += [zero_bubble_h1(stages, microbatches), zero_bubble_h2(stages, microbatches)]
    yield from filter(memory.allows, fixed)


def _fastest_greedy(
    microbatches: int, costs: Costs, memory: MemoryLimit, seconds: float, *, split_backward: bool
) -> GreedyOrder | None:
    """Find the fastest greedy order; None: none takes less than `seconds`."""
    best = None
    held = memory.held(split_backward=split_backward)
    most = memory.most_in_flight(split_backward=split_backward)
    # A split backward may make room before its second half.
    early = split_backward and held[0].after_backward < held[0].before_backward
    bound = None if early else most[0]
    least = least_seconds(microbatches, costs, bound, split_backward=split_backward)
    small = microbatches * len(costs.forward) <= _LARGE
    patience_choices = _PATIENCE if small else _PATIENCE[:1]
    ways = itertools.product(patience_choices, limit_spreads(costs, most), _PREFERENCES)
    for patience, spread, preference in ways:
        if seconds <= least * (1 + 1e-9):
            break  # what is left is rounding
        order = greedy(
            microbatches,
            costs,
            held,
            memory.room_for(spread, split_backward=split_backward),
            preference=preference,
            patience=patience,
            split_backward=split_backward,
            give_up_at=seconds,
        )
        if order is not None and order.seconds < seconds:
            best, seconds = order, order.seconds
    return best


def with_split_backward(schedule: Schedule) -> Schedule:
    """Split backwards: each gradient of weights follows the gradient of its input at once.

    What the stage before waits for leaves that much earlier.
    """
    orders = tuple(
        tuple(
            part
            for action in order
            for part in (
                [action, action._replace(kind=Kind.WEIGHT)]
                if action.kind is Kind.BACKWARD
                else [action]
            )
        )
        for order in schedule.orders
    )
    return dataclasses.replace(schedule, split_backward=True, orders=orders)


def limit_spreads(costs: Costs, most: Sequence[int]) -> list[tuple[int, ...]]:
    """Ways to spread the microbatches in flight, of which each stage has its most.

    The most for all; no more than keeps a stage busy while a microbatch goes through the stages
    behind it and back; and the limit in proportion to that way, with one to spare.
    """
    work = costs.work
    period = max(work)
    hops = [2 * hop.seconds for hop in costs.hops] + [0.0]
    ways = list(
        itertools.accumulate(
            own + behind for own, behind in zip(work[::-1], hops[::-1], strict=True)
        )
    )[::-1]
    enough = [math.ceil(way / period * (1 - 1e-12)) for way in ways]
    share = [1 + math.ceil(most[0] * way / ways[0]) for way in ways]
    spreads = (most, map(min, most, enough), map(min, most, share))
    return list(dict.fromkeys(map(tuple, spreads)))
