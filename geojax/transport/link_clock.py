"""Round trip and rate of the link to one peer, timed on the messages that a run exchanges anyway.

A message is on its way from when it is computed until its acknowledgment is here. Messages that
overlap are one burst, which takes a round trip and its bytes over the link's rate; the time between
bursts does not count.
"""

import threading
import time
from typing import NamedTuple


class MeasuredLink(NamedTuple):
    """The link to a peer over some time."""

    round_trip_seconds: float | None = None
    """Least time from a heartbeat to its echo; None: none came back."""
    bytes_per_second: float | None = None
    """Rate towards the peer while messages were on their way; None: none were."""


class LinkClock:
    """The times of heartbeats and messages to one peer, added up until `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._departures: dict[int, float] = {}
        self._busy_until = 0.0
        self._restart()

    def _restart(self) -> None:
        self._round_trips: list[float] = []
        self._bytes, self._seconds, self._bursts = 0, 0.0, 0

    def echoed(self, seconds: float) -> None:
        """Count the round trip of a heartbeat."""
        with self._lock:
            self._round_trips.append(seconds)

    def departed(self, message: int) -> None:
        """Note that a message is computed, and so on its way."""
        with self._lock:
            self._departures[message] = time.monotonic()

    def acknowledged(self, message: int, size: int) -> None:
        """Count a message of `size` bytes that the peer has."""
        now = time.monotonic()
        with self._lock:
            departure = self._departures.pop(message, None)
            if departure is None:  # it was here before anybody saw that it was computed
                return
            self._bursts += departure > self._busy_until
            self._seconds += now - max(departure, self._busy_until)
            self._bytes += size
            self._busy_until = now

    def take(self) -> MeasuredLink:
        """Return what was measured since the last call."""
        with self._lock:
            trip = min(self._round_trips, default=None)
            moving = self._seconds - self._bursts * (trip or 0.0)
            rate = self._bytes / moving if moving > 0 and trip is not None else None
            self._restart()
        return MeasuredLink(trip, rate)
