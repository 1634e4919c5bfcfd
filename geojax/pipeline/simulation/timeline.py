"""When everything happened: what the simulator returns, and pictures show."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar, overload

from geojax.pipeline.schedule import Action, Schedule


class WorkSpan(NamedTuple):
    """A stage at work."""

    stage: int
    action: Action
    start: float
    end: float


class TimedMessage(NamedTuple):
    """A message from one chunk to the next one, or back."""

    action: Action
    """The action that made the message."""
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
    """The link of the message; None: the network inside a site."""


Item = TypeVar("Item")


class Later(Sequence[Item]):
    """A sequence that is made when somebody first looks at it.

    Who compares hundreds of schedules looks at their seconds, not at all of their spans.
    """

    def __init__(self, make: Callable[[], Iterable[Item]]) -> None:
        self._make = make

    @functools.cached_property
    def _items(self) -> tuple[Item, ...]:
        return tuple(self._make())

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items == tuple(other)


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One iteration of a pipeline."""

    schedule: Schedule
    spans: Sequence[WorkSpan]
    """In the order in which they start."""
    messages: Sequence[TimedMessage]
    """In the order in which they were made."""
    seconds: float
    """The seconds of the iteration."""
    bubble_ratio: float
    """The share of its time in which the busiest stage is idle: 1 - work / seconds."""
    bubble_inside_sites: float
    """The part of the ratio that is idle time even if messages between sites took no time."""
    bubble_across_sites: float
    """The rest of it."""
    in_flight: tuple[int, ...]
    """For each stage, the most (microbatch, chunk) pairs whose forward it has begun and whose
    backward (the weights' part too) it has not ended."""
    link_use: dict[tuple[str, int, int], float]
    """For each link and direction, the share of time in which it sends: (link, 0, 1) towards later
    stages, (link, 1, 0) towards earlier ones."""

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """For each stage, the time from the start of its first action to the end of its last."""
        first = [self.seconds] * self.schedule.placement.stages
        last = [0.0] * self.schedule.placement.stages
        for stage, _, start, end in self.spans:
            first[stage] = min(first[stage], start)
            last[stage] = max(last[stage], end)
        return tuple(end - start for start, end in zip(first, last, strict=True))
