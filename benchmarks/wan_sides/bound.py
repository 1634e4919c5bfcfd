"""The efficiency that the order of a step's work allows over a link."""

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
    sent = 0.0
    for departure in departures:
        sent = max(sent, departure.seconds) + _seconds_of(departure.bytes, link)
    exposed = sent + link.delay_seconds - max(each.seconds for each in departures)
    return step_seconds / (step_seconds + exposed)


def pipeline_bound(step_seconds: float, hop_bytes: float, link: WanSettings) -> float:
    """Return the largest efficiency of a step of a pipeline whose stages are the two sites.

    The first microbatch cannot reach the second site, nor its cotangent the first one, sooner than
    a hop takes; and the scalars of the update are exchanged at the end.

    Args:
        step_seconds: time of a step over the unshaped link.
        hop_bytes: the stream of a microbatch.
        link: the long link.
    """
    hop = link.delay_seconds + _seconds_of(hop_bytes, link)
    return step_seconds / (step_seconds + 2 * hop + link.delay_seconds)


def _seconds_of(size: float, link: WanSettings) -> float:
    """Time in which so many bytes of payload leave."""
    if link.bytes_per_second is None:
        return 0.0
    return size * MTU / LARGEST_SEGMENT / link.bytes_per_second
