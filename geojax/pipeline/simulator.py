"""What a schedule takes: stages that begin their next action as soon as they can.

A stage works through its order and begins an action when the one before has ended and what it needs
has arrived. A message leaves when the action that made it ends and its link, in its direction, is
free; messages over a link go out in the order in which they were made. Inside a site messages do
not wait for each other.
"""

import heapq
from typing import NamedTuple

from geojax.pipeline.costs import Costs
from geojax.pipeline.schedule import Kind, Schedule
from geojax.pipeline.timeline import Message, Span, Timeline
from geojax.pipeline.validate import validate


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """One iteration of a pipeline whose stages do not wait for each other's ticks.

    Raises:
        ScheduleError: the schedule cannot finish; `validate` names the rule that it breaks.
    """
    run = _run(schedule, costs)
    if any(hop.link is not None for hop in costs.hops):
        inside = _run(schedule, costs.inside_sites).seconds
    else:
        inside = run.seconds
    return timeline_of(schedule, costs, run.starts, run.messages, run.seconds, inside)


def iteration_seconds(schedule: Schedule, costs: Costs) -> float:
    """The iteration time alone, for those who compare many schedules.

    Raises:
        ScheduleError: the schedule cannot finish.
    """
    return _run(schedule, costs).seconds


def durations_of(schedule: Schedule, costs: Costs) -> dict[Kind, tuple[float, ...]]:
    """For each kind of action that the schedule has, the seconds it takes in each chunk."""
    if schedule.split_backward:
        backward = costs.backward
    else:
        backward = tuple(
            inputs + weights for inputs, weights in zip(costs.backward, costs.weight, strict=True)
        )
    return {Kind.FORWARD: costs.forward, Kind.BACKWARD: backward, Kind.WEIGHT: costs.weight}


def timeline_of(
    schedule: Schedule,
    costs: Costs,
    starts: list[list[float]],
    messages: list[Message],
    seconds: float,
    seconds_inside: float,
) -> Timeline:
    """The timeline of actions that began at `starts` (for each stage, in its order).

    `seconds_inside` is the iteration time if messages over links took no time.
    """
    durations = durations_of(schedule, costs)
    spans = [
        Span(stage, action, start, start + durations[action.kind][action.chunk])
        for stage, order in enumerate(schedule.orders)
        for action, start in zip(order, starts[stage], strict=True)
    ]
    spans.sort(key=lambda span: span.start)
    work = [0.0] * schedule.placement.stages
    for chunk, stage in enumerate(schedule.placement.stage_of):
        work[stage] += schedule.microbatches * sum(
            durations[kind][chunk] for kind in schedule.kinds
        )
    sending: dict[tuple[str, int, int], float] = {}
    for _, source, target, start, sent, _, link in messages:
        if link is not None:
            direction = (link, 0, 1) if source < target else (link, 1, 0)
            sending[direction] = sending.get(direction, 0.0) + sent - start
    return Timeline(
        schedule=schedule,
        spans=tuple(spans),
        messages=tuple(messages),
        seconds=seconds,
        bubble_ratio=1 - max(work) / seconds,
        bubble_inside_sites=(seconds_inside - max(work)) / seconds,
        bubble_across_sites=(seconds - seconds_inside) / seconds,
        in_flight=schedule.in_flight,
        link_use={direction: busy / seconds for direction, busy in sorted(sending.items())},
    )


class _Run(NamedTuple):
    starts: list[list[float]]
    """For each stage, of each action of its order."""
    messages: list[Message]
    seconds: float


class Links:
    """When links can send: one message at a time in each direction, in the order of asking."""

    def __init__(self, costs: Costs) -> None:
        self._shared = costs.half_duplex
        self._free: dict[tuple[str, bool], float] = {}

    def send(self, link: str, later: bool, ready: float, transfer: float) -> tuple[float, float]:
        """When a message that is ready begins to leave, and when all of it has left.

        `later` says whether it goes towards later stages.
        """
        direction = (link, later or self._shared)
        start = max(ready, self._free.get(direction, 0.0))
        self._free[direction] = start + transfer
        return start, start + transfer


def _run(schedule: Schedule, costs: Costs) -> _Run:
    """Begin every action as soon as its stage and its input are there.

    An action is known by a number: (rank of its kind * chunks + chunk) * microbatches + microbatch.
    """
    placement, count = schedule.placement, schedule.microbatches
    chunks, stage_of = placement.chunks, placement.stage_of
    assert len(costs.forward) == chunks, "costs and placement have the same chunks"
    durations = durations_of(schedule, costs)
    kinds = schedule.kinds
    rank = {kind: index for index, kind in enumerate(kinds)}
    orders = [
        [(rank[kind] * chunks + chunk) * count + i for kind, i, chunk in order]
        for order in schedule.orders
    ]
    seconds_of = [duration for kind in kinds for duration in durations[kind]]
    last_forward, first_weight = chunks - 1, 2 * chunks

    arrived: list[float | None] = [None] * (len(kinds) * chunks * count)
    arrived[:count] = [0.0] * count  # the input of the first chunk
    links = Links(costs)
    position = [0] * placement.stages
    waits_for = [order[0] if order else -1 for order in orders]
    starts: list[list[float]] = [[] for _ in orders]
    messages: list[Message] = []
    running: list[tuple[float, int]] = []  # when each busy stage will be free

    for stage, first in enumerate(waits_for):
        if first >= 0 and (ready := arrived[first]) is not None:
            waits_for[stage] = -1
            starts[stage].append(ready)
            heapq.heappush(running, (ready + seconds_of[first // count], stage))
    now = 0.0
    while running:
        now, stage = heapq.heappop(running)
        order, place = orders[stage], position[stage]
        action = order[place]
        piece = action // count  # which kind, in which chunk
        woken = -1
        if piece < last_forward:
            hop, following = costs.hops[piece], action + count
        elif piece == last_forward:
            hop, following = None, action + chunks * count
        elif piece < first_weight:
            chunk = piece - chunks
            if len(kinds) == 3:  # its weights' gradient, on the same stage
                arrived[action + chunks * count] = now
            if chunk:
                hop, following = costs.hops[chunk - 1], action - count
            else:
                hop, following = None, -1
        else:
            hop, following = None, -1
        if following >= 0:
            arrival = now
            if hop is not None:
                target = stage_of[following // count % chunks]
                start = sent = now
                if hop.link is not None:
                    start, sent = links.send(hop.link, stage < target, now, hop.transfer)
                    arrival = sent + hop.latency
                else:
                    sent = now + hop.transfer
                    arrival = sent + hop.latency
                if target != stage:
                    made = schedule.orders[stage][place]
                    messages.append(Message(made, stage, target, start, sent, arrival, hop.link))
                if waits_for[target] == following:
                    woken = target
            arrived[following] = arrival
            if woken >= 0:
                waits_for[woken] = -1
                # It may have waited since long ago, but for nothing that came earlier than now.
                starts[woken].append(arrival)
                heapq.heappush(running, (arrival + seconds_of[following // count], woken))
        place += 1
        position[stage] = place
        if place < len(order):
            action = order[place]
            ready = arrived[action]
            if ready is None:
                waits_for[stage] = action
            else:
                begin = ready if ready > now else now
                starts[stage].append(begin)
                heapq.heappush(running, (begin + seconds_of[action // count], stage))
    if any(waits >= 0 for waits in waits_for):
        validate(schedule)
        raise AssertionError("a schedule that keeps the rules finishes")
    return _Run(starts, messages, now)
