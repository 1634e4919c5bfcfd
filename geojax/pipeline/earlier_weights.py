"""Split backwards in less memory: gradients of weights that come earlier than the order says.

Between its two halves a backward may hold more than before it. Some orders put off the gradients of
weights until a stage is idle, and then hold more than the forwards need. Where memory is short,
such an order loses little time if it runs the oldest of these gradients first.
"""

import dataclasses
from collections.abc import Sequence

from geojax.errors import UserError
from geojax.pipeline.schedule import Action, Kind, LayerBytes, Schedule, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step_seconds
from geojax.pipeline.simulation.simulator import iteration_seconds
from geojax.pipeline.ticks import Packing, in_ticks
from geojax.quantities import quantity

_SHARES = (1.0, 0.75, 0.5, 0.0)
"""The shares of the limit that orders are tried with: a tighter one may be faster by chance."""


def within_bytes(
    table: TickTable,
    layers_per_chunk: Sequence[int],
    layer: LayerBytes,
    *,
    limit: int | None = None,
) -> TickTable:
    """Return the fastest table that holds at most `limit` bytes on a stage.

    A forward, and each half of a backward, are taken to last equally long.

    Args:
        table: as its generator made it.
        layers_per_chunk: in the model's order.
        layer: what a layer holds of a microbatch.
        limit: bytes; None: where backwards are split, as much as the forwards need in any case, or
            the least that is possible.

    Raises:
        UserError: the schedule cannot keep within the limit.
    """
    orders = _that_fit(table.schedule, layers_per_chunk, layer, limit)
    costs = Costs.uniform(table.schedule.placement.chunks, 1.0, 1.0, 1.0)
    tables = [table] if table.schedule in orders else []
    tables += [
        in_ticks(each, table.hop_ticks, table.return_ticks, packing)
        for each in orders
        if each is not table.schedule
        for packing in Packing
    ]
    return min(tables, key=lambda each: lock_step_seconds(each, costs))


def order_within_bytes(
    schedule: Schedule,
    layers_per_chunk: Sequence[int],
    layer: LayerBytes,
    limit: int,
    costs: Costs,
) -> Schedule:
    """Return the fastest order that holds at most `limit` bytes on a stage, without ticks.

    Args:
        schedule: as its generator made it.
        layers_per_chunk: in the model's order.
        layer: what a layer holds of a microbatch.
        limit: in bytes.
        costs: of each chunk.

    Raises:
        UserError: the schedule cannot keep within the limit.
    """
    orders = _that_fit(schedule, layers_per_chunk, layer, limit)
    return min(orders, key=lambda each: iteration_seconds(each, costs))


def _that_fit(
    schedule: Schedule, layers_per_chunk: Sequence[int], layer: LayerBytes, limit: int | None
) -> list[Schedule]:
    """List the schedule, if it fits, and those of its variants with earlier weights that do."""
    room = limit
    if room is None:
        room = max(schedule.most_held(layers_per_chunk, layer.without_split))
    schedules = [schedule]
    if schedule.split_backward:
        of_chunk = [layer.times(count) for count in layers_per_chunk]
        schedules += [_earlier(schedule, of_chunk, share * room) for share in _SHARES]
    else:
        layer = layer.without_split
    held = {each: max(each.most_held(layers_per_chunk, layer)) for each in schedules}
    least = min(held.values())
    if limit is not None and least > limit:
        needed, allowed = quantity(least, "B"), quantity(limit, "B")
        raise UserError(
            f"the schedule '{schedule.name}' holds {needed} on a stage where "
            f"pipeline.memory_limit_bytes is {allowed}; {needed} would work"
        )
    return [each for each in held if held[each] <= max(room, least)]


def _earlier(schedule: Schedule, of_chunk: Sequence[LayerBytes], room: float) -> Schedule:
    """Run the oldest gradients of weights first wherever a stage would hold more than `room`."""
    orders = (_earlier_in(order, of_chunk, room) for order in schedule.orders)
    return dataclasses.replace(schedule, orders=tuple(orders))


def _earlier_in(
    order: Sequence[Action], of_chunk: Sequence[LayerBytes], room: float
) -> tuple[Action, ...]:
    made: list[Action] = []
    waiting: list[Action] = []
    early: set[Action] = set()
    held = 0

    def make_room(needed: int) -> None:
        nonlocal held
        while waiting and held + needed > room:
            early.add(waiting[0])
            held -= of_chunk[waiting[0].chunk].after_backward
            made.append(waiting.pop(0))

    for action in order:
        own = of_chunk[action.chunk]
        if action.kind is Kind.FORWARD:
            make_room(own.before_backward)
            held += own.before_backward
        elif action.kind is Kind.BACKWARD:
            make_room(own.in_backward - own.before_backward)
            held += own.after_backward - own.before_backward
            waiting.append(action._replace(kind=Kind.WEIGHT))
        elif action in early:
            continue
        else:
            waiting.remove(action)
            held -= own.after_backward
        made.append(action)
    return tuple(made)
