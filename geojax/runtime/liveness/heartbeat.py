"""The heartbeat of each process: one entry in the key-value store, renewed every 2 seconds.

An entry carries the sender's clock, what the process is doing, and how long its latest ones took to
process 0 and back. Clocks of different machines are never compared: a process is silent when its
entry does not change. Only process 0 reads the entries of all; the others read what it makes of
them (`geojax.runtime.liveness.health`).
"""

import collections
import json
import math
import time
from typing import NamedTuple

from geojax.runtime.jax_private import process_index_and_count
from geojax.runtime.key_value_store import publish, published

INTERVAL_SECONDS = 2.0
"""Longest time between two heartbeats of a process."""

_LONGEST_ACTIVITY = 100
_ROUND_TRIPS = 8


class Heartbeat(NamedTuple):
    """The newest heartbeat of one process."""

    time: float
    """The sender's monotonic clock; comparable with earlier heartbeats of the same process only."""
    step: int
    """Latest step that the process has entered; -1 before the first."""
    activity: str
    """Name of the work that the process does in that step."""
    round_trip_seconds: float = math.nan
    """Least time that one of the process's latest heartbeats took to process 0 and back; nan before
    the first came back."""


_progress = (-1, "start-up")
_round_trips: collections.deque[float] = collections.deque(maxlen=_ROUND_TRIPS)


def report_progress(step: int, activity: str) -> None:
    """Let the next heartbeats of this process carry `step` and `activity`."""
    global _progress
    _progress = (step, activity)


def send_heartbeat() -> None:
    """Renew this process's entry in the key-value store."""
    own, _ = process_index_and_count()
    now = time.monotonic()
    trip = min(_round_trips, default=None)
    publish(f"heartbeat/{own}", json.dumps([now, *_progress, trip]))
    _round_trips.append(time.monotonic() - now)


def read_heartbeats() -> dict[int, Heartbeat]:
    """Return the newest heartbeat of each process that has sent one; for process 0 alone."""
    _, count = process_index_and_count()
    found = {}
    for name, entry in published("heartbeat").items():
        heartbeat = _parsed(entry)
        if heartbeat is not None and name.isdecimal() and int(name) < count:
            found[int(name)] = heartbeat
    return found


def _parsed(entry: str) -> Heartbeat | None:
    """Return the heartbeat in an entry; None if it is none."""
    try:
        clock, step, activity, trip = json.loads(entry)
    except (ValueError, TypeError, RecursionError):
        return None
    if type(clock) is not float or not math.isfinite(clock) or type(step) is not int:
        return None
    if type(activity) is not str or not activity.isprintable():
        return None
    if trip is None:
        trip = math.nan
    if type(trip) is not float:
        return None
    return Heartbeat(clock, step, activity[:_LONGEST_ACTIVITY], trip)
