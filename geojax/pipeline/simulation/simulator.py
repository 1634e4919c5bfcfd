"""The time of a schedule whose stages begin their next action as soon as they can.

A stage works through its order and begins an action when the one before has ended and what it needs
has arrived. A message leaves when the action that made it ends and its link, in its direction, is
free; messages over a link go out in the order in which they were made. Inside a site messages do
not wait for each other.

With late receives a message leaves only when its receiver is also free and has come to the action
that needs it. Frameworks whose point-to-point receives block work like that: no stage computes
while its next input is on its way.

Stages may share a device: it runs one action at a time, in the order in which they could begin.
"""

import collections
import heapq
import itertools
import math
import operator
from collections.abc import Iterator
from typing import NamedTuple

from geojax.pipeline.rules import validate
from geojax.pipeline.schedule import Kind, Schedule
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.timeline import Later, TimedMessage, Timeline, WorkSpan

Sent = tuple[int, int, int, int, float, float, float]
"""A message: the hop that it takes (its index in the costs), the stage that sends it, the place of
the action that made it in that stage's order, the stage that receives it; when its first byte
leaves, when its last has left, when all of it is there."""


def simulate(
    schedule: Schedule, costs: Costs, *, late_receives: bool = False, stages_per_device: int = 1
) -> Timeline:
    """One iteration of a pipeline whose stages do not wait for each other's ticks.

    Args:
        schedule: the order of each stage.
        costs: the times of its chunks and hops.
        late_receives: a message leaves only when the receiving stage waits for it.
        stages_per_device: so many consecutive stages share each device.

    Raises:
        ScheduleError: the schedule cannot finish; `validate` names the rule that it breaks.
    """
    sent: list[Sent] = []
    starts, seconds = _run(schedule, costs, sent, late_receives, stages_per_device)
    inside = seconds
    if any(hop.link is not None for hop in costs.hops):
        _, inside = _run(schedule, costs.inside_sites, None, late_receives, stages_per_device)
    return timeline_of(schedule, costs, starts, sent, seconds, inside, stages_per_device)


def iteration_seconds(schedule: Schedule, costs: Costs, *, late_receives: bool = False) -> float:
    """Compute the iteration time alone, for those who compare many schedules.

    Raises:
        ScheduleError: the schedule cannot finish.
    """
    return _run(schedule, costs, None, late_receives, stages_per_device=1)[1]


def durations_of(schedule: Schedule, costs: Costs) -> dict[Kind, tuple[float, ...]]:
    """For each kind of action that the schedule has, the seconds it takes in each chunk."""
    return dict(zip(Kind, costs.durations(split_backward=schedule.split_backward), strict=True))


def timeline_of(
    schedule: Schedule,
    costs: Costs,
    starts: list[list[float]],
    sent: list[Sent],
    seconds: float,
    seconds_inside: float,
    stages_per_device: int = 1,
) -> Timeline:
    """Make the timeline of actions that began at `starts` (for each stage, in its order).

    `seconds_inside` is the iteration time if messages over links took no time.
    """
    durations = durations_of(schedule, costs)
    work = [0.0] * schedule.placement.stages  # of each device
    for chunk, stage in enumerate(schedule.placement.stage_of):
        work[stage // stages_per_device] += schedule.microbatches * sum(
            durations[kind][chunk] for kind in schedule.kinds
        )
    sending: dict[tuple[str, int, int], float] = {}
    for boundary, stage, _, target, start, end, _ in sent:
        link = costs.hops[boundary].link
        if link is not None:
            direction = (link, 0, 1) if stage < target else (link, 1, 0)
            sending[direction] = sending.get(direction, 0.0) + end - start

    def spans() -> list[WorkSpan]:
        made: list[WorkSpan] = []
        for stage, (order, begins) in enumerate(zip(schedule.orders, starts, strict=True)):
            ends = [
                start + durations[kind][chunk]
                for (kind, _, chunk), start in zip(order, begins, strict=True)
            ]
            made.extend(map(WorkSpan, itertools.repeat(stage), order, begins, ends))
        made.sort(key=operator.itemgetter(2))  # by their start
        return made

    def messages() -> Iterator[TimedMessage]:
        for boundary, stage, place, target, start, end, arrival in sent:
            made = schedule.orders[stage][place]
            yield TimedMessage(made, stage, target, start, end, arrival, costs.hops[boundary].link)

    return Timeline(
        schedule=schedule,
        spans=Later(spans),
        messages=Later(messages),
        seconds=seconds,
        bubble_ratio=1 - max(work) / seconds,
        bubble_inside_sites=(seconds_inside - max(work)) / seconds,
        bubble_across_sites=(seconds - seconds_inside) / seconds,
        in_flight=schedule.in_flight,
        link_use={direction: busy / seconds for direction, busy in sorted(sending.items())},
    )


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


class _Piece(NamedTuple):
    """The consequences of one kind of action in one chunk."""

    next_piece: int
    """The piece that needs it, of the same microbatch; -1: none does."""
    target: int
    """The stage of that one."""
    seconds: float
    """The seconds of the action."""
    boundary: int
    """The hop between the two, its index in the costs."""
    latency: float
    transfer: float
    link: str | None


def _pieces(schedule: Schedule, costs: Costs) -> list[_Piece]:
    """List the pieces of every kind and chunk: forwards first, then backwards."""
    stage_of, chunks = schedule.placement.stage_of, schedule.placement.chunks
    durations = durations_of(schedule, costs)
    pieces = []
    for rank, kind in enumerate(schedule.kinds):
        step = 1 if kind is Kind.FORWARD else -1
        for chunk, seconds in enumerate(durations[kind]):
            neighbor = chunk + step
            if kind is not Kind.WEIGHT and 0 <= neighbor < chunks:
                hop = costs.hops[min(chunk, neighbor)]
                pieces.append(
                    _Piece(
                        rank * chunks + neighbor,
                        stage_of[neighbor],
                        seconds,
                        min(chunk, neighbor),
                        hop.latency,
                        hop.transfer,
                        hop.link,
                    )
                )
            else:
                turns = kind is Kind.FORWARD  # the last chunk's forward: its backward is next
                following = chunks + chunk if turns else -1
                pieces.append(_Piece(following, stage_of[chunk], seconds, -1, 0.0, 0.0, None))
    return pieces


def _run(
    schedule: Schedule,
    costs: Costs,
    messages: list[Sent] | None,
    late_receives: bool,
    stages_per_device: int,
) -> tuple[list[list[float]], float]:
    """Begin every action as soon as its stage, its device and its input are there.

    Returns when each action of each stage's order begins, and when all have ended. Messages are
    appended to `messages`.

    An action is known by a number, piece * microbatches + microbatch.
    """
    placement, count = schedule.placement, schedule.microbatches
    chunks = placement.chunks
    assert len(costs.forward) == chunks, "costs and placement have the same chunks"
    first_of = {kind: rank * chunks for rank, kind in enumerate(schedule.kinds)}
    orders = [
        [(first_of[kind] + chunk) * count + microbatch for kind, microbatch, chunk in order]
        for order in schedule.orders
    ]
    pieces = _pieces(schedule, costs)
    backwards, weights = chunks, 2 * chunks if schedule.split_backward else len(pieces)
    never = math.inf
    arrived = [never] * (len(pieces) * count)
    arrived[:count] = [0.0] * count  # the input of the first chunk
    offers: dict[int, tuple[int, int]] = {}  # of late receives: who made an action's input, where
    links = Links(costs)
    position = [0] * placement.stages
    waits_for = [-1] * placement.stages  # the action that an idle stage cannot begin yet
    starts: list[list[float]] = [[] for _ in orders]
    running: list[tuple[float, int]] = []  # when each busy stage will be free, or asks for a device
    asking: set[int] = set()  # stages that can begin then, if their device is free
    queues: dict[int, collections.deque[int]] = {}  # of stages, by the busy device they wait for
    push, pop = heapq.heappush, heapq.heappop

    def send(stage: int, place: int, ready: float) -> float:
        """Let the result of an action leave as soon as the link is free; return its arrival."""
        _, target, _, boundary, latency, transfer, link = pieces[orders[stage][place] // count]
        start, sent = ready, ready + transfer
        if link is not None:
            start, sent = links.send(link, stage < target, ready, transfer)
        arrival = sent + latency
        if messages is not None and target != stage:
            messages.append((boundary, stage, place, target, start, sent, arrival))
        return arrival

    def begin_next(stage: int, free: float) -> None:
        """Begin a free stage's next action, or note what it waits for."""
        action = orders[stage][position[stage]]
        begin = arrived[action]
        if begin is never:
            waits_for[stage] = action
            return
        if begin < free:
            begin = free
        if action in offers:
            begin = send(*offers.pop(action), begin)
        if stages_per_device > 1:
            asking.add(stage)
            push(running, (begin, stage))
            return
        begin_at(stage, begin)

    def begin_at(stage: int, begin: float) -> None:
        starts[stage].append(begin)
        action = orders[stage][position[stage]]
        push(running, (begin + pieces[action // count].seconds, stage))

    for stage in range(placement.stages):
        begin_next(stage, 0.0)
    now = 0.0
    while running:
        now, stage = pop(running)
        device = stage // stages_per_device
        if stage in asking:
            asking.remove(stage)
            if device in queues:
                queues[device].append(stage)
            else:
                queues[device] = collections.deque()
                begin_at(stage, now)
            continue
        if stages_per_device > 1:
            if queues[device]:
                begin_at(queues[device].popleft(), now)
            else:
                del queues[device]
        order, place = orders[stage], position[stage]
        action = order[place]
        piece = action // count
        next_piece, target = pieces[piece][:2]
        if backwards <= piece < weights < len(pieces):
            arrived[action + chunks * count] = now  # its weights' gradient, on the same stage
        if next_piece >= 0:
            following = action + (next_piece - piece) * count
            if late_receives and target != stage:
                arrived[following] = now
                offers[following] = stage, place
            else:
                arrived[following] = send(stage, place, now)
            if waits_for[target] == following:
                waits_for[target] = -1
                begin_next(target, now)
        position[stage] = place + 1
        if place + 1 < len(order):
            begin_next(stage, now)
    if max(waits_for) >= 0:
        validate(schedule)
        raise AssertionError("a schedule that keeps the rules finishes")
    return starts, now
