"""When everything happened: what the simulator returns, and pictures show."""

import dataclasses

from geojax.pipeline.schedule import Action, Schedule


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A stage at work."""

    stage: int
    action: Action
    start: float
    end: float


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """What travels from one chunk to the next one, or back."""

    action: Action
    """What made it."""
    source: int
    """The sending stage."""
    target: int
    start: float
    """When its first byte leaves."""
    sent: float
    """When its last byte has left: the link is free again."""
    end: float
    """When all of it is there."""
    link: str | None
    """What it travelled over; None: the network inside a site."""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One iteration of a pipeline."""

    schedule: Schedule
    spans: tuple[Span, ...]
    """In the order in which they start."""
    messages: tuple[Message, ...]
    seconds: float
    """Of the iteration."""
    bubble_ratio: float
    """The share of its time in which the busiest stage is idle: 1 - work / seconds."""
    bubble_inside_sites: float
    """The part of the ratio that there would be without latency and transfers across sites."""
    bubble_across_sites: float
    """The rest of it."""
    in_flight: tuple[int, ...]
    """For each stage, the most (microbatch, chunk) pairs whose forward it has begun and whose backward
    (the weights' part too) it has not ended."""
    link_use: dict[tuple[str, int, int], float]
    """For each link and direction (source site's side, target's), the share of time in which it sends."""
