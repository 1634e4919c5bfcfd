"""The time of a tick table where stages work in lock-step, as in one program of all stages."""

from typing import NamedTuple

import numpy as np

from geojax.pipeline.schedule import KIND_RANK, Action, Kind, TickTable
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.simulation.simulator import Links, Sent, durations_of, timeline_of
from geojax.pipeline.simulation.timeline import Timeline


def lock_step(table: TickTable, costs: Costs) -> Timeline:
    """One iteration in which every stage begins a tick when all have ended the one before.

    A tick lasts as long as its busiest stage. A head that stages share (`Costs.head`) comes before
    all else; between the forwards and the rest if a microbatch turns in one tick. What a tick made
    leaves at its end and travels until the tick begins that is the hop's ticks later: that one
    waits for it, on all stages.

    So several messages may be under way over one hop, as the ticks ask for. The program of
    `geojax.pipeline.execution` has one: it waits for a message at the end of the tick after the
    one that made it, so that a hop which takes longer than a tick makes every tick as long.
    """
    starts, messages, seconds = _run(table, costs)
    if any(hop.link is not None for hop in costs.hops):
        inside = _run(table, costs.inside_sites)[2]
    else:
        inside = seconds
    return timeline_of(table.schedule, costs, starts, messages, seconds, inside)


def lock_step_seconds(table: TickTable, costs: Costs) -> float:
    """Compute the iteration time alone, for those who compare many tables.

    It is that of `lock_step`, but for rounding: all actions of a tick are counted at once.
    """
    lengths, messages = _tick_lengths(table, costs), _messages(table, costs)
    late, links = _late_seconds(table, costs), Links(costs)
    not_before = [0.0] * (table.ticks + max((*table.hop_ticks, *table.return_ticks), default=1))
    now = 0.0
    for tick, (length, inside) in enumerate(zip(lengths, messages.inside, strict=True)):
        now = max(now, not_before[tick]) + length
        for ticks, seconds in zip(messages.hop_ticks, inside, strict=True):
            if seconds >= 0:
                arrival = now - late[tick] + seconds
                not_before[tick + ticks] = max(not_before[tick + ticks], arrival)
        for hop, ticks, is_later in messages.over_links.get(tick, ()):
            assert hop.link is not None, "it crosses one"
            _, sent = links.send(hop.link, is_later, now, hop.transfer)
            not_before[tick + ticks] = max(not_before[tick + ticks], sent + hop.latency)
    return now


def _tick_lengths(table: TickTable, costs: Costs) -> list[float]:
    """Return the seconds of each tick, those of its busiest stage."""
    tick, stage, kind, chunk = table.by_tick.T
    durations = durations_of(table.schedule, costs)
    none = (0.0,) * table.schedule.placement.chunks
    seconds = np.array([durations.get(each, none) for each in KIND_RANK])
    work, forward = seconds[kind, chunk], kind == KIND_RANK[Kind.FORWARD]

    def longest(counts: np.ndarray) -> np.ndarray:
        of_stage = np.zeros((table.ticks, len(table.schedule.orders)))
        np.add.at(of_stage, (tick, stage), work * counts)
        most: np.ndarray = of_stage.max(axis=1)
        return most

    length, shared = longest(np.ones_like(forward)), _OfAllStages.of(table, costs)
    if shared.parted.any():
        parted = longest(forward) + longest(~forward)
        length = np.where(shared.parted, parted, length)
    lengths: list[float] = (length + shared.seconds).tolist()
    return lengths


def _late_seconds(table: TickTable, costs: Costs) -> list[float]:
    """Return the seconds of gradients that each tick ends with, beside what it has sent."""
    seconds = [0.0] * table.ticks
    if costs.late:
        first, end = table.full_run(shares_head=bool(costs.head))
        seconds[first:end] = [costs.late] * (end - first)
    return seconds


class _OfAllStages(NamedTuple):
    """The part of each tick in which no stage is ahead of another."""

    seconds: np.ndarray
    """Seconds that all stages spend together."""
    parted: np.ndarray
    """True if that is between the forwards and the other actions; else it is before both."""

    @classmethod
    def of(cls, table: TickTable, costs: Costs) -> "_OfAllStages":
        seconds, parted = np.zeros(table.ticks), np.zeros(table.ticks, bool)
        forwards, backwards = table.last_chunk_ticks.T
        if costs.head and table.turns_later:
            seconds[backwards] = costs.head
        elif costs.head:
            seconds[backwards], parted[backwards] = costs.head + costs.apart, True
        else:
            seconds[backwards[forwards == backwards]] = costs.apart
        return cls(seconds, parted)


class _Messages(NamedTuple):
    """The messages that each tick sends."""

    hop_ticks: tuple[int, ...]
    """Ticks that hops without a link may have."""
    inside: list[list[float]]
    """[ticks, hop_ticks]: seconds of the longest such hop; none waits for another. -inf: no hop."""
    over_links: dict[int, list[tuple[Hop, int, bool]]]
    """Hops over links of each tick: in order, their ticks, and if they go to later stages."""


def _messages(table: TickTable, costs: Costs) -> _Messages:
    stage_of = np.array(table.schedule.placement.stage_of)
    forward = KIND_RANK[Kind.FORWARD]
    following = table.by_tick[:, 3] + np.where(table.by_tick[:, 2] == forward, 1, -1)
    sends = table.by_tick[:, 2] != KIND_RANK[Kind.WEIGHT]
    sends &= (following >= 0) & (following < len(stage_of))
    tick, stage, kind, chunk = table.by_tick[sends].T
    following = following[sends]
    boundary = np.minimum(chunk, following)
    both_ways = np.array([table.hop_ticks, table.return_ticks], int)
    hop_ticks = both_ways[(kind != forward).astype(int), boundary]
    is_link = np.array([hop.link is not None for hop in costs.hops], bool)[boundary]

    used, place = np.unique(hop_ticks[~is_link], return_inverse=True)
    inside = np.full((table.ticks, len(used)), -np.inf)
    seconds = np.array([hop.seconds for hop in costs.hops], float)[boundary]
    np.maximum.at(inside, (tick[~is_link], place), seconds[~is_link])
    over_links: dict[int, list[tuple[Hop, int, bool]]] = {}
    is_later = stage < stage_of[following]
    crossing = (each[is_link].tolist() for each in (tick, boundary, hop_ticks, is_later))
    for at, number, ticks, later in zip(*crossing, strict=True):
        over_links.setdefault(at, []).append((costs.hops[number], ticks, later))
    return _Messages(tuple(used.tolist()), inside.tolist(), over_links)


def _run(table: TickTable, costs: Costs) -> tuple[list[list[float]], list[Sent], float]:
    schedule, stage_of = table.schedule, table.schedule.placement.stage_of
    durations = durations_of(schedule, costs)
    by_tick: list[list[tuple[int, int, Action]]] = [[] for _ in range(table.ticks)]
    for stage, (order, ticks) in enumerate(zip(schedule.orders, table.starts, strict=True)):
        for place, (action, tick) in enumerate(zip(order, ticks, strict=True)):
            by_tick[tick].append((stage, place, action))
    links = Links(costs)
    longest = max((*table.hop_ticks, *table.return_ticks), default=1)
    not_before = [0.0] * (table.ticks + longest)
    starts: list[list[float]] = [[] for _ in schedule.orders]
    messages: list[Sent] = []
    shared, late = _OfAllStages.of(table, costs), _late_seconds(table, costs)
    now = 0.0
    for tick, actions in enumerate(by_tick):
        now = max(now, not_before[tick])
        busy_until = dict.fromkeys((stage for stage, _, _ in actions), now)
        together = now + shared.seconds[tick]
        if shared.parted[tick]:
            forwards = (of.chunk for *_, of in actions if of.kind is Kind.FORWARD)
            together += max((durations[Kind.FORWARD][chunk] for chunk in forwards), default=0.0)
        for stage, _, action in actions:
            if action.kind is not Kind.FORWARD or not shared.parted[tick]:
                busy_until[stage] = max(busy_until[stage], together)
            starts[stage].append(busy_until[stage])
            busy_until[stage] += durations[action.kind][action.chunk]
        now = max(busy_until.values(), default=now)
        for stage, place, action in actions:
            kind, _, chunk = action
            following = chunk + (1 if kind is Kind.FORWARD else -1)
            if kind is Kind.WEIGHT or not 0 <= following < len(stage_of):
                continue
            boundary, target = min(chunk, following), stage_of[following]
            hop, arrival_tick = costs.hops[boundary], tick + table.ticks_of_hop(kind, boundary)
            start, sent = now - late[tick], now - late[tick] + hop.transfer
            if hop.link is not None:
                start, sent = links.send(hop.link, stage < target, now, hop.transfer)
            not_before[arrival_tick] = max(not_before[arrival_tick], sent + hop.latency)
            if stage != target:
                arrival = sent + hop.latency
                messages.append((boundary, stage, place, target, start, sent, arrival))
    return starts, messages, now
