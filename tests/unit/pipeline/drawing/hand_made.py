"""Timelines written by hand, for what draws and records them."""

from geojax.pipeline.schedule import Action, Kind, Placement, Schedule
from geojax.pipeline.simulation.timeline import TimedMessage, Timeline, WorkSpan

SITES = ("east", "west")


def two_stages(microbatches=2, link="east-west"):
    """Two stages in two sites, one microbatch after the other: F 1 s, B 2 s, a hop of 0.5 + 3 s."""
    spans, messages = [], []
    for microbatch in range(microbatches):
        clock = 13.0 * microbatch
        actions = [
            Action(kind, microbatch, chunk)
            for kind, chunk in (
                (Kind.FORWARD, 0),
                (Kind.FORWARD, 1),
                (Kind.BACKWARD, 1),
                (Kind.BACKWARD, 0),
            )
        ]
        for action, start in zip(actions, (0.0, 4.5, 5.5, 11.0), strict=True):
            seconds = 1.0 if action.kind is Kind.FORWARD else 2.0
            spans.append(WorkSpan(action.chunk, action, clock + start, clock + start + seconds))
        for action, start in ((actions[0], 1.0), (actions[2], 7.5)):
            sent, end = clock + start + 0.5, clock + start + 3.5
            ends = (action.chunk, 1 - action.chunk)
            messages.append(TimedMessage(action, *ends, clock + start, sent, end, link))
    orders = tuple(tuple(span.action for span in spans if span.stage == stage) for stage in (0, 1))
    schedule = Schedule("one at a time", Placement(2, (0, 1)), microbatches, False, orders)
    use = {("east-west", 0, 1): 1 / 26, ("east-west", 1, 0): 1 / 26}
    return Timeline(
        schedule,
        tuple(spans),
        tuple(messages),
        seconds=13.0 * microbatches,
        bubble_ratio=10 / 13,
        bubble_inside_sites=3 / 13,
        bubble_across_sites=7 / 13,
        in_flight=(1, 1),
        link_use=use,
    )
