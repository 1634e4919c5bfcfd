"""The efficiency that the order of a step's messages allows over a link."""

from typing import NamedTuple

from geojax.wan import WanSettings
from geojax.wan.settings import LARGEST_SEGMENT, MTU


class Departure(NamedTuple):
    """A message that leaves a site during a step."""

    seconds: float
    """Time from the start of the step until the message is computed."""
    bytes: float


def efficiency_bound(step_seconds: float, departures: list[Departure], link: WanSettings) -> float:
    """Return the largest efficiency of a step whose messages leave so.

    A message begins to travel when it is computed and the one before it has left, and nobody asks
    for it first. Work after the last message waits for all of them, and nothing else does.

    Args:
        step_seconds: time of a step over the unshaped link.
        departures: the messages of one site, in their order, in such a step.
        link: the long link.
    """
    rate = None if link.bytes_per_second is None else link.bytes_per_second * LARGEST_SEGMENT / MTU
    sent = 0.0
    for departure in departures:
        sent = max(sent, departure.seconds) + (departure.bytes / rate if rate else 0.0)
    exposed = sent + link.delay_seconds - max(each.seconds for each in departures)
    return step_seconds / (step_seconds + exposed)
