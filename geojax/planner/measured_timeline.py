"""Measured times of a step: one timeline with the simulated one beside it, and a trace.

A recorded step runs action by action, so that the time of each one is its own, while messages
travel as ever. The simulator then gets the medians of those times, and of the messages' on the way:
the difference between both timelines is what the host, the link's jitter and the sums cost.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from geojax.islands.actions import Receive, Send, received
from geojax.islands.recording import Record
from geojax.pipeline.drawing.trace import (
    Event,
    event,
    from_to,
    microseconds,
    name_event,
    write_trace,
)
from geojax.pipeline.rules import requirement
from geojax.pipeline.schedule import Action, Kind, Schedule
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.simulation.simulator import iteration_seconds, simulate
from geojax.pipeline.simulation.timeline import TimedMessage, Timeline, WorkSpan


def draw(
    schedule: Schedule,
    stages: Mapping[str, Record],
    image: Path,
    trace: Path,
    stages_per_site: int = 1,
) -> tuple[float, float]:
    """Draw a recorded step beside the simulated one, as a PNG and as a trace for Perfetto.

    Args:
        schedule: of as many stages as there are records.
        stages: the record of each stage by its name, all by one clock.
        image: file of the picture.
        trace: file of the trace, which shows sums, waits and arrivals as well.
        stages_per_site: stages of every site.

    Returns:
        The seconds of the measured step and of the simulated one.
    """
    from geojax.pipeline.drawing.timelines import save_timelines  # it imports matplotlib

    measured = measured_timeline(schedule, list(stages.values()), stages_per_site)
    simulated = simulate(_named(schedule, "simulated"), measured_costs(measured))
    save_timelines([measured, simulated], list(stages), image)
    write_trace([measured, simulated], trace, _events(3, stages))
    return measured.seconds, simulated.seconds


def measured_timeline(
    schedule: Schedule, records: Sequence[Record], stages_per_site: int = 1
) -> Timeline:
    """Return the timeline of a recorded step, from its first action to its update."""
    origin = min(record[0].start for record in records)
    seconds = max(record[-1].end for record in records) - origin
    spans = [
        WorkSpan(stage, each.action, each.taken - origin, each.end - origin)
        for stage, record in enumerate(records)
        for each in record
        if isinstance(each.action, Action)
    ]
    messages = list(_messages(schedule, records, origin, stages_per_site))
    costs = _costs(schedule, spans, messages)
    work = max(
        sum(each.end - each.start for each in spans if each.stage == stage)
        for stage in range(len(records))
    )
    inside = min(max(work, iteration_seconds(schedule, costs.inside_sites)), seconds)
    return Timeline(
        _named(schedule, "measured"),
        sorted(spans, key=lambda span: span.start),
        messages,
        seconds,
        bubble_ratio=1 - work / seconds,
        bubble_inside_sites=(inside - work) / seconds,
        bubble_across_sites=(seconds - inside) / seconds,
        in_flight=schedule.in_flight,
        link_use=_link_use(messages, seconds),
    )


def measured_costs(timeline: Timeline) -> Costs:
    """Return the medians of the times of each chunk's work, and of the messages on their way."""
    return _costs(timeline.schedule, timeline.spans, timeline.messages)


def _costs(
    schedule: Schedule, spans: Sequence[WorkSpan], messages: Sequence[TimedMessage]
) -> Costs:
    chunks = range(schedule.placement.chunks)

    def work(kind: Kind, chunk: int) -> float:
        own = [
            span.end - span.start
            for span in spans
            if (span.action.kind, span.action.chunk) == (kind, chunk)
        ]
        return statistics.median(own) if own else 0.0

    def hop(chunk: int) -> Hop:
        # Forwards from this chunk, and backwards from the next one.
        crossing = [
            message
            for message in messages
            if message.action.chunk == chunk + (message.action.kind is not Kind.FORWARD)
        ]
        if not crossing:
            return Hop()
        latency = statistics.median(message.end - message.start for message in crossing)
        return Hop(latency, link=crossing[0].link)

    forward, backward, weight = (tuple(work(kind, chunk) for chunk in chunks) for kind in Kind)
    return Costs(forward, backward, weight, tuple(hop(chunk) for chunk in chunks[:-1]))


def _messages(
    schedule: Schedule, records: Sequence[Record], origin: float, stages_per_site: int
) -> Iterator[TimedMessage]:
    """Yield the hops between stages, each from its offer to its arrival, in the order of offers."""
    offers = {
        each.action.action: (stage, each.dispatched)
        for stage, record in enumerate(records)
        for each in record
        if isinstance(each.action, Send)
    }
    arrivals = {
        each.action.action: (stage, each.arrivals[0])
        for stage, record in enumerate(records)
        for each in record
        if isinstance(each.action, Receive)
    }
    for user, (source, offered) in sorted(offers.items(), key=lambda item: item[1][1]):
        target, arrival = arrivals[user]
        made = requirement(schedule, user)
        assert made is not None, "an action that takes a message follows another one"
        first, second = sorted(stage // stages_per_site for stage in (source, target))
        link = None if first == second else f"{first}-{second}"
        start, end = offered - origin, max(offered, arrival) - origin
        yield TimedMessage(made, source, target, start, end, end, link)


def _link_use(
    messages: Sequence[TimedMessage], seconds: float
) -> dict[tuple[str, int, int], float]:
    """Return the share of time in which messages are on their way, by link and direction."""
    busy: dict[tuple[str, int, int], float] = {}
    until: dict[tuple[str, int, int], float] = {}
    for message in messages:
        if message.link is None:
            continue
        way = (message.link, *((0, 1) if message.target > message.source else (1, 0)))
        start = max(message.start, until.get(way, 0.0))
        busy[way] = busy.get(way, 0.0) + max(0.0, message.end - start)
        until[way] = max(message.end, start)
    return {way: time / seconds for way, time in sorted(busy.items())}


def _named(schedule: Schedule, what: str) -> Schedule:
    return dataclasses.replace(schedule, name=f"{schedule.name}, {what}")


def _events(process: int, stages: Mapping[str, Record]) -> Iterator[Event]:
    """Yield the actions of each stage as slices of a trace: waits, dispatches, device time."""
    origin = min(record[0].start for record in stages.values())
    yield name_event("process", process, 0, "measured actions")
    for stage, (name, record) in enumerate(stages.items()):
        waits, dispatches, devices = range(3 * stage, 3 * stage + 3)
        yield name_event("thread", process, waits, f"site {name}: host waits")
        yield name_event("thread", process, dispatches, f"site {name}: host dispatches")
        yield name_event("thread", process, devices, f"site {name}: devices")
        for each in record:
            start, taken, dispatched, end = (time - origin for time in each[1:5])
            # Of an action its bucket, or the work that takes the message.
            title = " ".join([type(each.action).__name__, *map(str, each.action[:1])])
            if isinstance(each.action, Action):
                title = str(each.action)
            slices = [(dispatches, "dispatch", taken, dispatched), (devices, "devices", taken, end)]
            if each.arrivals:
                slices.insert(0, (waits, "wait", start, taken))
            here = {
                f"{message.kind} from site {sender} arrives_us": microseconds(time - origin)
                for (sender, message), time in zip(
                    received(each.action), each.arrivals, strict=True
                )
            }
            for track, category, first, last in slices:
                args = here if category == "wait" else {}
                times = from_to(first, last)
                yield event("X", process, track, name=title, cat=category, args=args, **times)
