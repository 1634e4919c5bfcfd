"""The ledger of a run: what its wall-clock seconds went into, over all of its attempts.

An attempt is one start of the command. `goodput.jsonl` has a line for each attempt that has ended,
and `goodput-now.json` is the one that runs; it is written about once a second, so that a killed
attempt leaves it behind. The next attempt moves it into the file of lines. The seconds between two
attempts are lost.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from geojax.paths import write_atomically
from geojax.train.writing.appended_file import AppendedFile
from geojax.train.writing.background_writer import Put

Kind = Literal[
    "starting", "compiling", "productive", "recomputed", "waiting", "data", "validation", "saving"
]
"""The work that seconds went into. recomputed: steps that an earlier attempt had done too.
waiting: devices waited for another site, or this process for others at the start. data: devices
waited for a batch."""

Outcome = Literal["end", "stopped", "failed", "killed"]
"""The end of an attempt. stopped: by a signal. killed: it left no other trace."""

ATTEMPTS = "goodput.jsonl"
RUNNING = "goodput-now.json"
START = "other processes at the start"
"""Whom an attempt waits for until all processes have compiled."""

_WRITE_SECONDS = 1.0


@dataclasses.dataclass
class Attempt:
    """The seconds of one attempt so far."""

    attempt: int
    """Number of the attempt, from 1."""
    began: float
    """Seconds since the epoch at which its process began."""
    ended: float
    """Seconds since the epoch up to which its seconds are known."""
    first_step: int
    """Step that it goes on from."""
    last_step: int
    """Last step that it has done."""
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds by `Kind`, and `other`, which none of them has."""
    waiting_for: dict[str, float] = dataclasses.field(default_factory=dict)
    """The seconds of `waiting` by the site that was waited for."""
    outcome: Outcome = "killed"

    def to_json(self) -> str:
        """Return the attempt in one line of JSON."""
        content = dataclasses.asdict(self)
        for name in ("seconds", "waiting_for"):
            content[name] = {key: round(value, 4) for key, value in content[name].items()}
        return json.dumps(content)


def process_began() -> float:
    """Return the seconds since the epoch at which this process began, imports included."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Behind the command's name, which may hold blanks, the start is field 22 of Linux's stat.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = float(Path("/proc/uptime").read_text().split()[0])
        age = since_boot - int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - max(age, 0.0)
    return time.time()


class GoodputLedger:
    """The ledger of an attempt, on the process that writes a run's files."""

    def __init__(self, folder: Path, put: Put, *, began: float, step: int) -> None:
        """Open the ledger of a run that goes on from `step`.

        Args:
            folder: the run directory.
            put: writes in the background.
            began: seconds since the epoch at which the attempt began.
            step: the last step that was restored; 0 for a new run.
        """
        self._folder, self._put = folder, put
        self._lines = AppendedFile(folder / ATTEMPTS)
        ended, running = _ended_attempts(folder), _running_attempt(folder)
        earlier = ended if running is None else [*ended, running]
        self._reached = max((attempt.last_step for attempt in earlier), default=0)
        self.attempt = Attempt(len(earlier) + 1, began, time.time(), step, step)
        self._clock, self._written = time.monotonic(), 0.0
        self._since = self._clock - (self.attempt.ended - began)
        if running is not None:
            line = f"{running.to_json()}\n".encode()
            put(ATTEMPTS, lambda: self._lines.append(line))
        self._write()

    def spend(self, kind: Kind, seconds: float, waiting_for: str | None = None) -> None:
        """Count seconds of a kind."""
        spent = self.attempt.seconds
        spent[kind] = spent.get(kind, 0.0) + seconds
        if waiting_for is not None:
            waited = self.attempt.waiting_for
            waited[waiting_for] = waited.get(waiting_for, 0.0) + seconds

    @contextlib.contextmanager
    def spent(self, kind: Kind) -> Iterator[None]:
        """Count the seconds of the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spend(kind, time.monotonic() - began)

    def step(self, step: int, seconds: float, data: float, waits: Mapping[str, float]) -> None:
        """Count the seconds of a step.

        Args:
            step: number of the step.
            seconds: all of them.
            data: those in which devices waited for its batch.
            waits: those in which devices waited for other sites, by site.
        """
        self.attempt.last_step = step
        self.spend("data", data)
        for site, waited in waits.items():
            self.spend("waiting", waited, site)
        rest = max(seconds - data - sum(waits.values()), 0.0)
        self.spend("recomputed" if step <= self._reached else "productive", rest)
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self._write()

    def end(self, outcome: Outcome) -> None:
        """Note how the attempt ended."""
        self.attempt.outcome = outcome
        line = f"{self._known().to_json()}\n".encode()

        def write() -> None:
            self._lines.append(line)
            (self._folder / RUNNING).unlink(missing_ok=True)

        self._put(ATTEMPTS, write)

    def _known(self) -> Attempt:
        """Return the attempt with the seconds that no kind has."""
        now = time.monotonic()
        attempt = self.attempt
        attempt.ended = attempt.began + now - self._since
        kinds = {kind: value for kind, value in attempt.seconds.items() if kind != "other"}
        attempt.seconds = kinds | {"other": max(now - self._since - sum(kinds.values()), 0.0)}
        return attempt

    def _write(self) -> None:
        self._written = time.monotonic()
        content, path = self._known().to_json(), self._folder / RUNNING
        self._put(RUNNING, lambda: write_atomically(path, content, durable=False))


def read_attempts(folder: Path) -> list[Attempt]:
    """Read the attempts of a run directory, in order; the last one may be running.

    What is damaged is left out.
    """
    running = _running_attempt(folder)
    return _ended_attempts(folder) + ([] if running is None else [running])


def _ended_attempts(folder: Path) -> list[Attempt]:
    attempts = map(_attempt, _texts(folder / ATTEMPTS))
    return list({each.attempt: each for each in attempts if each is not None}.values())


def _running_attempt(folder: Path) -> Attempt | None:
    """Read the attempt that runs or was killed; None: the last one has ended."""
    ended = {attempt.attempt for attempt in _ended_attempts(folder)}
    for running in map(_attempt, _texts(folder / RUNNING)):
        if running is not None and running.attempt not in ended:
            return running
    return None


def _texts(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _attempt(text: str) -> Attempt | None:
    """Return the attempt of a line; None: it is damaged."""
    names = [field.name for field in dataclasses.fields(Attempt)]
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        content: Mapping[str, Any] = json.loads(text)
        attempt = Attempt(**{name: content[name] for name in names if name in content})
        numbers = (attempt.attempt, attempt.first_step, attempt.last_step)
        if all(isinstance(number, int) for number in numbers):
            return attempt
    return None
