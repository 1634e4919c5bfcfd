"""Events of a run, its attempts, and the goodput that follows from them."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from geojax.network_names import is_site_name
from geojax.saved_runs.records.step_record import finite, whole

Use = Literal[
    "productive", "recomputed", "starting", "compiling", "waiting", "data", "validation", "saving"
]
"""A use of an attempt's seconds. recomputed: steps that an earlier attempt had done too. waiting:
devices waited for another site, or this process for others at the start. data: devices waited for
a batch."""

CATEGORIES = (*get_args(Use), "other")
"""Uses of an attempt's seconds, as goodput.jsonl names them."""

LOST = "lost"
"""Seconds between attempts."""

UNATTRIBUTED = "unattributed"
"""Seconds of attempts that no use accounts for."""

_LONGEST_TEXT = 500


@dataclasses.dataclass(frozen=True)
class EventRecord:
    """An event of a run."""

    time: float | None
    """Seconds since the epoch; None: not known."""
    step: int | None
    kind: str
    text: str

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "EventRecord | None":
        """Read a line of events.jsonl; None: it is no event."""
        kind, text = line.get("kind"), line.get("text", "")
        if not isinstance(kind, str) or not isinstance(text, str):
            return None
        return cls(
            finite(line.get("time")),
            whole(line.get("step")),
            kind[:_LONGEST_TEXT],
            text[:_LONGEST_TEXT],
        )


@dataclasses.dataclass(frozen=True)
class AttemptRecord:
    """A start of the command, up to its end or up to now."""

    attempt: int
    began: float
    """Seconds since the epoch."""
    ended: float
    first_step: int | None
    last_step: int | None
    seconds: Mapping[str, float]
    """Seconds by `CATEGORIES`."""
    waiting_for: Mapping[str, float]
    """Seconds of waiting by site."""
    outcome: str | None
    """end, stopped, failed or killed; None: it goes on."""

    @classmethod
    def of(cls, line: Mapping[str, Any], *, is_over: bool) -> "AttemptRecord | None":
        """Read a line of goodput.jsonl, or goodput-now.json; None: it is no attempt."""
        began, number = finite(line.get("began")), whole(line.get("attempt"))
        if began is None or number is None:
            return None
        seconds = {
            name: max(0.0, value)
            for name, value in _numbers(line.get("seconds")).items()
            if name in CATEGORIES
        }
        ended = finite(line.get("ended"))
        outcome = line.get("outcome")
        waiting = _numbers(line.get("waiting_for"))
        return cls(
            number,
            began,
            max(began, began + sum(seconds.values()) if ended is None else ended),
            whole(line.get("first_step")),
            whole(line.get("last_step")),
            seconds,
            {site: max(0.0, value) for site, value in waiting.items() if is_site_name(site)},
            (outcome if isinstance(outcome, str) else "ended")[:_LONGEST_TEXT] if is_over else None,
        )


def _numbers(mapping: Any) -> dict[str, float]:
    if not isinstance(mapping, Mapping):
        return {}
    return {
        name: number for name, value in mapping.items() if (number := finite(value)) is not None
    }


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Uses of a run's wall-clock time, over all attempts."""

    total_seconds: float
    """Seconds from the first start to the last end, or to now."""
    seconds: Mapping[str, float]
    """Seconds by `CATEGORIES`, lost and unattributed; the zeros are left out."""
    waiting_for: Mapping[str, float]
    """Seconds of waiting by site."""

    @classmethod
    def of(cls, attempts: Sequence[AttemptRecord]) -> "Goodput | None":
        """Add up attempts in their order; None: there are none."""
        if not attempts:
            return None
        total = max(attempt.ended for attempt in attempts) - attempts[0].began
        seconds = dict.fromkeys((*CATEGORIES, LOST, UNATTRIBUTED), 0.0)
        waiting: dict[str, float] = {}
        for attempt in attempts:
            add_numbers(seconds, attempt.seconds)
            add_numbers(waiting, attempt.waiting_for)
            known = sum(attempt.seconds.values())
            seconds[UNATTRIBUTED] += max(0.0, attempt.ended - attempt.began - known)
        seconds[LOST] = sum(max(0.0, end - start) for start, end in gaps(attempts))
        return cls(total, {name: each for name, each in seconds.items() if each > 0}, waiting)

    @property
    def productive_share(self) -> float | None:
        """Share of the time in steps that were done for the first time; None: no time passed."""
        if self.total_seconds <= 0:
            return None
        return self.seconds.get("productive", 0.0) / self.total_seconds


def add_numbers(totals: dict[str, float], numbers: Mapping[str, float]) -> None:
    """Add numbers to the totals of their names."""
    for name, number in numbers.items():
        totals[name] = totals.get(name, 0.0) + number


def gaps(attempts: Sequence[AttemptRecord]) -> list[tuple[float, float]]:
    """Return the end and the next beginning around each time between attempts."""
    pairs = itertools.pairwise(attempts)
    return [(before.ended, after.began) for before, after in pairs if after.began > before.ended]


def in_order(
    over: Iterable[AttemptRecord], current: AttemptRecord | None
) -> tuple[AttemptRecord, ...]:
    """Return attempts by their beginning, with the one that goes on unless it is over too."""
    by_number = {attempt.attempt: attempt for attempt in over}
    if current is not None and current.attempt not in by_number:
        by_number[current.attempt] = current
    return tuple(sorted(by_number.values(), key=lambda attempt: attempt.began))
