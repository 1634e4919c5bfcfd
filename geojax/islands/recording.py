"""Times of the actions of one step at one site, and those of all sites by one clock."""

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from geojax.islands.actions import Message, SiteAction, received, sent


class Recorded(NamedTuple):
    """Times of an action, on the monotonic clock of its host."""

    action: SiteAction
    start: float
    """When the host came to it."""
    taken: float
    """When its messages were taken; the start where it takes none."""
    dispatched: float
    """When its programs were dispatched and its messages offered."""
    end: float
    """When the devices had run its programs."""
    arrivals: tuple[float, ...]
    """When each message that it takes was here, in the order of `received`."""

    def earlier(self, seconds: float) -> "Recorded":
        """Return the same by a clock that shows less."""
        start, taken, dispatched, end = (time - seconds for time in self[1:5])
        here = tuple(arrival - seconds for arrival in self.arrivals)
        return Recorded(self.action, start, taken, dispatched, end, here)


Record = Sequence[Recorded]
"""A step of a site, action by action."""


def as_words(records: Sequence[Record], lists: Sequence[Sequence[SiteAction]]) -> np.ndarray:
    """Write the records of a site's stages as uint32, in a shape that is the same at all sites.

    Args:
        records: of each stage of this site.
        lists: the actions of each stage of all sites.
    """
    arrivals = max(len(list(received(action))) for actions in lists for action in actions)
    times = np.zeros((len(records), max(map(len, lists)), 4 + arrivals))
    for stage, record in enumerate(records):
        for number, (_, *of_action, arrived) in enumerate(record):
            row = (*of_action, *arrived)
            times[stage, number, : len(row)] = row
    return times.view(np.uint32)


def from_words(words: np.ndarray, lists: Sequence[Sequence[SiteAction]]) -> list[Record]:
    """Invert `as_words`, with the lists of the stages of that site."""
    made: list[Record] = []
    for actions, rows in zip(lists, words.view(np.float64), strict=True):
        record = []
        for action, row in zip(actions, rows, strict=False):
            start, taken, dispatched, end, *arrivals = map(float, row)
            here = tuple(arrivals[: len(list(received(action)))])
            record.append(Recorded(action, start, taken, dispatched, end, here))
        made.append(record)
    return made


def by_one_clock(
    records: Sequence[Record], stages_per_site: int, stages_per_process: int
) -> list[Record]:
    """Return the records of all stages by the clock of the first one's process.

    A clock that is ahead makes messages from its process look late, and messages to its process
    look early by as much. Take the fastest message each way: half of their difference is the
    clock's, if both directions take equally long. Clocks are compared with that of their site's
    first process, and these with the first one of all.

    Args:
        records: of each stage, by the clock of its process.
        stages_per_site: stages of every site.
        stages_per_process: stages of every process; 1: at most one.
    """
    offered = {
        (stage, receiver, message): each.dispatched
        for stage, record in enumerate(records)
        for each in record
        for receiver, message in sent(each.action)
    }
    fastest = _fastest(records, offered, stages_per_process)

    def ahead(process: int, of: int) -> float:
        return (fastest[of, process] - fastest[process, of]) / 2 if process != of else 0.0

    made: list[Record] = []
    for stage, record in enumerate(records):
        process = stage // stages_per_process
        first = stage // stages_per_site * stages_per_site // stages_per_process
        seconds = ahead(process, first) + ahead(first, 0)
        made.append([each.earlier(seconds) for each in record])
    return made


def _fastest(
    records: Sequence[Record],
    offered: Mapping[tuple[int, int, Message], float],
    stages_per_process: int,
) -> dict[tuple[int, int], float]:
    """Return the seconds of the fastest message between two processes, by both their clocks."""
    seconds: dict[tuple[int, int], float] = collections.defaultdict(lambda: float("inf"))
    for stage, record in enumerate(records):
        for each in record:
            for (sender, message), arrival in zip(
                received(each.action), each.arrivals, strict=True
            ):
                way = (sender // stages_per_process, stage // stages_per_process)
                taken = arrival - offered[sender, stage, message]
                seconds[way] = min(seconds[way], taken)
    return seconds
