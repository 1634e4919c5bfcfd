"""Timelines as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is the JSON array of the "Trace Event Format" document (Google, 2016): complete events
(`X`) for work and for sending, flow events (`s`, `t`, `f`) for messages, metadata (`M`) for names.
Each timeline is a process of the trace; its stages and the directions of its links are threads.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from geojax.pipeline.schedule import Action, Kind
from geojax.pipeline.simulation.timeline import TimedMessage, Timeline

Event = dict[str, Any]

_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.WEIGHT: "weight gradient"}
_DIRECTIONS = {(0, 1): "to later stages", (1, 0): "to earlier stages"}
_COLORS = {  # names that trace viewers know
    Kind.FORWARD: "thread_state_running",
    Kind.BACKWARD: "thread_state_iowait",
    Kind.WEIGHT: "thread_state_runnable",
}


def write_trace(timelines: Sequence[Timeline], path: Path, more: Iterable[Event] = ()) -> None:
    """Write all timelines into one trace, one event a line; they start together, at 0.

    Args:
        timelines: the first is process 1 of the trace.
        path: file of the trace.
        more: events of further processes.
    """
    own = itertools.chain.from_iterable(map(trace_events, itertools.count(1), timelines))
    events = itertools.chain(own, more)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, each in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(each, separators=(",", ":")))
        file.write("\n]}\n")


def trace_events(process: int, timeline: Timeline) -> Iterator[Event]:
    """List the events of a timeline as process `process` of the trace, in microseconds.

    A message is an arrow from the work that made it to the work that uses it, by way of the
    sending on its link's track if it crosses between sites. That slice lasts while the link is
    busy; when the message has arrived stands in its arguments.
    """
    schedule = timeline.schedule
    stages = schedule.placement.stages
    directions = sorted(timeline.link_use)  # of each link first towards later stages, then back
    title = f"{schedule.name}: {timeline.seconds:.6g} s, bubble {timeline.bubble_ratio:.2%}"
    yield name_event("process", process, 0, title)
    tracks = [f"stage {stage}" for stage in range(stages)]
    tracks += [f"link {link}, {_DIRECTIONS[source, target]}" for link, source, target in directions]
    for track, name in enumerate(tracks):
        yield name_event("thread", process, track, name)
        yield event("M", process, track, name="thread_sort_index", args={"sort_index": track})
    for span in timeline.spans:
        action = span.action
        yield event(
            "X",
            process,
            span.stage,
            name=str(action),
            cat=_NAMES[action.kind],
            cname=_COLORS[action.kind],
            **from_to(span.start, span.end),
            args={"microbatch": action.microbatch, "chunk": action.chunk},
        )
    span_of = {span.action: span for span in timeline.spans}
    for number, message in enumerate(timeline.messages):
        yield from _message_events(process, number, message, stages, directions, span_of)


def _message_events(
    process: int,
    number: int,
    message: TimedMessage,
    stages: int,
    directions: list[tuple[str, int, int]],
    span_of: dict[Action, Any],
) -> Iterator[Event]:
    arrow = {"id": f"{process}.{number}", "cat": "message", "name": str(message.action)}
    # An arrow belongs to the slice in which its ends lie: viewers draw it from that slice's end.
    made = span_of[message.action]
    yield event("s", process, message.source, ts=microseconds(made.start), **arrow)
    if message.link is not None:
        way = (0, 1) if message.target > message.source else (1, 0)
        track = stages + directions.index((message.link, *way))
        yield event(
            "X",
            process,
            track,
            name=str(message.action),
            cat="sending",
            **from_to(message.start, message.sent),
            args={"arrives_us": microseconds(message.end)},
        )
        yield event("t", process, track, ts=microseconds(message.start), **arrow)
    used = span_of[_user(message.action)]
    yield event("f", process, message.target, bp="e", ts=microseconds(used.start), **arrow)


def _user(action: Action) -> Action:
    """Return the action that waits for the message of `action`."""
    step = 1 if action.kind is Kind.FORWARD else -1
    return Action(action.kind, action.microbatch, action.chunk + step)


def event(phase: str, process: int, track: int, **rest: Any) -> Event:
    """Make an event of a track."""
    return {"ph": phase, "pid": process, "tid": track, **rest}


def name_event(what: str, process: int, track: int, name: str) -> Event:
    """Make the event that names a process or a thread."""
    return event("M", process, track, name=f"{what}_name", args={"name": name})


def from_to(start: float, end: float) -> Event:
    """Return start and length of a slice, so that the next one does not begin within it."""
    first = microseconds(start)
    return {"ts": first, "dur": round(microseconds(end) - first, 3)}


def microseconds(seconds: float) -> float:
    """Return a time as traces have it."""
    return round(seconds * 1e6, 3)  # Perfetto counts whole nanoseconds
