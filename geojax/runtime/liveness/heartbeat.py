"""The heartbeat of each process: one entry in the key-value store, renewed every 2 seconds.

An entry carries the sender's clock and what the process is doing. Clocks of different machines are
never compared: a process is silent when its entry does not change.
"""

import json
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from geojax.runtime.jax_private import process_index_and_count
from geojax.runtime.key_value_store import publish, published

INTERVAL_SECONDS = 2.0
"""Longest time between two heartbeats of a process."""

# While this process has sent so many heartbeats, every living process has sent one.
_OWN_HEARTBEATS = 3
_POLL_SECONDS = 0.5
# Enough for as many heartbeats on a busy machine, over a long link.
_ANSWER_SECONDS = 5 * INTERVAL_SECONDS


class Heartbeat(NamedTuple):
    """The newest heartbeat of one process."""

    time: float
    """The sender's monotonic clock; comparable with earlier heartbeats of the same process only."""
    step: int
    """Latest step that the process has entered; -1 before the first."""
    activity: str
    """Name of the work that the process does in that step."""


_progress = (-1, "start-up")


def report_progress(step: int, activity: str) -> None:
    """Let the next heartbeats of this process carry `step` and `activity`."""
    global _progress
    _progress = (step, activity)


def send_heartbeat() -> None:
    """Renew this process's entry in the key-value store."""
    own, _ = process_index_and_count()
    publish(f"heartbeat/{own}", json.dumps([time.monotonic(), *_progress]))


def read_heartbeats() -> dict[int, Heartbeat]:
    """Return the newest heartbeat of each process that has sent one."""
    entries = published("heartbeat")
    return {int(process): Heartbeat(*json.loads(entry)) for process, entry in entries.items()}


class SilenceDetector:
    """Finds the processes whose heartbeat has not changed for `timeout_seconds`."""

    def __init__(self, process_count: int, timeout_seconds: float, now: float):
        """Start at time `now`; a process that never sends a heartbeat is silent from then on."""
        self._timeout_seconds = timeout_seconds
        self._newest: list[tuple[Heartbeat | None, float]] = [(None, now)] * process_count

    def silent(self, heartbeats: Mapping[int, Heartbeat], now: float) -> list[int]:
        """Take in the newest `heartbeats` and return the processes that are silent."""
        for process, (newest, _) in enumerate(self._newest):
            heartbeat = heartbeats.get(process)
            if heartbeat != newest:
                self._newest[process] = (heartbeat, now)
        return [
            process
            for process, (_, since) in enumerate(self._newest)
            if now - since > self._timeout_seconds
        ]


def silent_processes() -> list[int]:
    """Wait until every other process has sent a heartbeat, and return those that do not.

    It takes about 5 s when a process is silent and 10 s at most. The result is empty when this
    process sends no heartbeats itself, as without `geojax.runtime.start`.
    """
    own, count = process_index_and_count()
    # When process 0, which holds the store, is gone, reading may never return.
    found: list[list[int]] = [[0] if own else []]
    asking = threading.Thread(target=lambda: found.append(_silent(own, count)), daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return found[-1]


def _silent(own: int, count: int) -> list[int]:
    try:
        first = newest = read_heartbeats()
        if own not in first:
            return []
        silent, own_heartbeats = [process for process in range(count) if process != own], 0
        while silent and own_heartbeats < _OWN_HEARTBEATS:
            time.sleep(_POLL_SECONDS)
            previous, newest = newest, read_heartbeats()
            own_heartbeats += newest[own] != previous[own]
            silent = [process for process in silent if newest.get(process) == first.get(process)]
    except Exception:  # of JAX's client, which cannot reach process 0
        return [0] if own else []
    return silent
