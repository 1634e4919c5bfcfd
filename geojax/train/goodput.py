"""The ledger of a run: what its wall-clock seconds went into, over all of its attempts.

An attempt is one start of the command. `goodput.jsonl` has a line for each attempt that has ended,
and `goodput-now.json` is the one that runs; it is written about once a second, so that a killed
attempt leaves it behind. The next attempt moves it into the file of lines. The seconds between two
attempts are lost.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from geojax.paths import write_atomically
from geojax.run_paths import GOODPUT, GOODPUT_NOW
from geojax.saved_runs.records.attempt_records import AttemptRecord, Use, add_numbers, in_order
from geojax.train.writing.appended_file import AppendedFile
from geojax.train.writing.background_writer import Put

Outcome = Literal["end", "stopped", "failed", "killed"]
"""The end of an attempt. stopped: by a signal. killed: it left no other trace."""

START = "start"
"""Name in `waiting_for` of the other processes, until all have compiled."""

_WRITE_SECONDS = 1.0


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
        self._lines = AppendedFile(folder / GOODPUT)
        earlier = read_attempts(folder)
        self._reached = max((attempt.last_step or 0 for attempt in earlier), default=0)
        self.attempt = 1 + max((attempt.attempt for attempt in earlier), default=0)
        """Number of the attempt, from 1."""
        self.last_step = step
        """Last step that is done."""
        self._began, self._first_step = began, step
        self._seconds: dict[str, float] = {}
        self._waiting_for: dict[str, float] = {}
        self._written = 0.0
        self._since = time.monotonic() - (time.time() - began)
        killed = _running(folder)
        if killed is not None:
            line = f"{json.dumps(killed)}\n".encode()
            put(GOODPUT, lambda: self._lines.append(line))
        self._write()

    def spend(self, kind: Use, seconds: float, waiting_for: str | None = None) -> None:
        """Count seconds of a kind."""
        add_numbers(self._seconds, {kind: seconds})
        if waiting_for is not None:
            add_numbers(self._waiting_for, {waiting_for: seconds})

    @contextlib.contextmanager
    def spent(self, kind: Use) -> Iterator[None]:
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
        self.last_step = step
        self.spend("data", data)
        for site, waited in waits.items():
            self.spend("waiting", waited, site)
        rest = max(seconds - data - sum(waits.values()), 0.0)
        self.spend("recomputed" if step <= self._reached else "productive", rest)
        if time.monotonic() - self._written >= _WRITE_SECONDS:
            self._write()

    def end(self, outcome: Outcome) -> None:
        """Note how the attempt ended."""
        line = f"{self._line(outcome)}\n".encode()

        def write() -> None:
            self._lines.append(line)
            (self._folder / GOODPUT_NOW).unlink(missing_ok=True)

        self._put(GOODPUT, write)

    def _line(self, outcome: Outcome) -> str:
        """Return the attempt as JSON, with the seconds that no kind has as `other`."""
        elapsed = time.monotonic() - self._since
        rest = max(elapsed - sum(self._seconds.values()), 0.0)
        return json.dumps(
            {
                "attempt": self.attempt,
                "began": self._began,
                "ended": self._began + elapsed,
                "first_step": self._first_step,
                "last_step": self.last_step,
                "seconds": _rounded(self._seconds | {"other": rest}),
                "waiting_for": _rounded(self._waiting_for),
                "outcome": outcome,
            }
        )

    def _write(self) -> None:
        """Write the running attempt: what is left of it if it is killed."""
        self._written = time.monotonic()
        content, path = self._line("killed"), self._folder / GOODPUT_NOW
        self._put(GOODPUT_NOW, lambda: write_atomically(path, content, durable=False))


def read_attempts(folder: Path) -> tuple[AttemptRecord, ...]:
    """Read the attempts of a run directory, in order; the last one may be running.

    What is damaged is left out.
    """
    running = _running(folder)
    ended = [_record(line) for line in _objects(folder / GOODPUT)]
    return in_order(
        [attempt for attempt in ended if attempt is not None],
        None if running is None else _record(running),
    )


def _record(line: Mapping[str, Any]) -> AttemptRecord | None:
    return AttemptRecord.of(line, is_over=True)


def _running(folder: Path) -> Mapping[str, Any] | None:
    """Read the attempt that runs or was killed; None: the last one has ended."""
    ended = {line.get("attempt") for line in _objects(folder / GOODPUT)}
    for line in _objects(folder / GOODPUT_NOW):
        if _record(line) is not None and line["attempt"] not in ended:
            return line
    return None


def _objects(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a file's lines; what is damaged is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    objects = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            objects.append(json.loads(line))
    return [each for each in objects if isinstance(each, dict)]


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}
