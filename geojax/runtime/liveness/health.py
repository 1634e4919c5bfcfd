"""The health of all processes: process 0 reads their heartbeats and publishes what they say.

With N processes the store serves N entries a second, to process 0, and when something went wrong a
short report to each of the others. If each read the heartbeats of all, it would be N squared.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from geojax.job.exit_messages import NAMED_PROCESSES, describe
from geojax.runtime.jax_private import process_index_and_count
from geojax.runtime.key_value_store import publish, read
from geojax.runtime.liveness.heartbeat import Heartbeat, read_heartbeats

INTERVAL_SECONDS = 1.0
"""Time between two reports."""

# Readings in a row without a new heartbeat, after which a process counts as quiet.
_QUIET_READINGS = 5
# Reports without a quiet process, after which a broken connection is nobody's death: all processes
# that live have sent a heartbeat since.
_ENOUGH_REPORTS = 9
_POLL_SECONDS = 0.5
# Enough for as many reports on a busy machine, over a long link.
_ANSWER_SECONDS = 12.0


class Group(NamedTuple):
    """Some processes of a job, of which a report lists the first only."""

    first: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, processes: Iterable[int]) -> "Group":
        """Return the group of all `processes`."""
        ordered = sorted(processes)
        return cls(tuple(ordered[:NAMED_PROCESSES]), len(ordered))

    @classmethod
    def parsed(cls, entry: tuple[Sequence[int], int]) -> "Group":
        """Return the group that was published as JSON."""
        first, size = entry
        return cls(tuple(first), size)

    def __str__(self) -> str:
        return describe(self.first, self.size)


class Health(NamedTuple):
    """A report of process 0 on all processes."""

    number: int
    """Number of the report, from 1."""
    quiet: Group
    """Processes without a new heartbeat for about 5 s."""
    furthest: int
    """Highest step that a process has entered."""
    behind: Group
    """Processes that have not entered it."""
    at: tuple[int, str]
    """Step and activity of the first that is behind."""


class HealthKeeper:
    """The bookkeeping of process 0: who sent a new heartbeat when."""

    def __init__(self, process_count: int, timeout_seconds: float, now: float):
        """Start at time `now`; a process that never sends a heartbeat is silent from then on."""
        self._timeout_seconds = timeout_seconds
        self._newest: list[Heartbeat | None] = [None] * process_count
        self._since = [now] * process_count
        self._readings = [0] * process_count
        self._number = 0

    def take_in(self, heartbeats: Mapping[int, Heartbeat], now: float) -> list[int]:
        """Take in the newest `heartbeats`; return the processes without one for too long.

        An old heartbeat that somebody has written back is none.
        """
        for process, newest in enumerate(self._newest):
            self._readings[process] += 1
            heartbeat = heartbeats.get(process)
            if heartbeat is not None and (newest is None or heartbeat.time > newest.time):
                self._newest[process] = heartbeat
                self._since[process], self._readings[process] = now, 0
        return [
            process
            for process, since in enumerate(self._since)
            if now - since > self._timeout_seconds
        ]

    def report(self) -> Health:
        """Return the next report."""
        self._number += 1
        known = {process: newest for process, newest in enumerate(self._newest) if newest}
        furthest = max((heartbeat.step for heartbeat in known.values()), default=-1)
        behind = Group.of(process for process in known if known[process].step < furthest)
        slowest = known[behind.first[0]] if behind.size else None
        return Health(
            self._number,
            quiet=Group.of(
                process
                for process, missed in enumerate(self._readings)
                if missed >= _QUIET_READINGS
            ),
            furthest=furthest,
            behind=behind,
            at=(slowest.step, slowest.activity) if slowest else (furthest, ""),
        )


def keep_health(keeper: HealthKeeper, now: float) -> list[int]:
    """Read all heartbeats, publish the report on them; return the processes silent for too long."""
    silent = keeper.take_in(read_heartbeats(), now)
    publish("health", json.dumps(keeper.report()))
    return silent


def read_health() -> Health | None:
    """Return the newest report; None if there is none."""
    entry = read("health")
    if entry is None:
        return None
    number, quiet, furthest, behind, at = json.loads(entry)
    return Health(number, Group.parsed(quiet), furthest, Group.parsed(behind), (at[0], at[1]))


def await_health(after: int = 0, timeout_seconds: float = 3 * INTERVAL_SECONDS) -> Health | None:
    """Wait for a report that is newer than number `after`; None if none comes."""
    deadline = time.monotonic() + timeout_seconds
    while (health := read_health()) is None or health.number <= after:
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return health


def quiet_processes() -> Group:
    """Wait until every other process would have sent a heartbeat; return those that did not.

    It takes up to 9 s when a process is gone and 12 s at most. The result is empty when there are
    no reports, as without `geojax.runtime.start`.
    """
    own, _ = process_index_and_count()
    # When process 0, which holds the store, is gone, reading may never return.
    found = [Group.of([0] if own else [])]
    asking = threading.Thread(target=lambda: found.append(_quiet(own)), daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    return found[-1]


def _quiet(own: int) -> Group:
    nobody, process_0 = Group.of([]), Group.of([0] if own else [])
    try:
        health = read_health()
        if health is None:
            return nobody
        enough = health.number + _ENOUGH_REPORTS
        while health.number < enough:
            following = await_health(health.number, _ANSWER_SECONDS)
            if following is None:
                return process_0
            if health.quiet.size and following.quiet.size:  # all that died together are in both
                return following.quiet
            health = following
    except Exception:  # of JAX's client, which cannot reach process 0
        return process_0
    return nobody
