"""The time of a tick table where stages work in lock-step, as in one program of all stages."""

from geojax.pipeline.schedule import Action, Kind, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.simulator import Links, Sent, durations_of, timeline_of
from geojax.pipeline.simulation.timeline import Timeline


def lock_step(table: TickTable, costs: Costs) -> Timeline:
    """One iteration in which every stage begins a tick when all have ended the one before.

    A tick lasts as long as its busiest stage. What a tick made leaves at its end and travels until
    the tick begins that is the hop's ticks later: that one waits for it, on all stages.

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
    """Compute the iteration time alone, for those who compare many tables."""
    return _run(table, costs)[2]


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
    now = 0.0
    for tick, actions in enumerate(by_tick):
        now = max(now, not_before[tick])
        busy_until = dict.fromkeys((stage for stage, _, _ in actions), now)
        for stage, _, action in actions:
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
            start, sent = now, now + hop.transfer
            if hop.link is not None:
                start, sent = links.send(hop.link, stage < target, now, hop.transfer)
            not_before[arrival_tick] = max(not_before[arrival_tick], sent + hop.latency)
            if stage != target:
                arrival = sent + hop.latency
                messages.append((boundary, stage, place, target, start, sent, arrival))
    return starts, messages, now
