"""An attempt of a run: the files that say how it began, what it spent its time on and how it ended.

An attempt is one start of the command.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from geojax.saved_runs.records.attempt_records import Use
from geojax.train.events import EventKind, EventLog
from geojax.train.goodput import START, GoodputLedger
from geojax.train.training_loop import TrainingLoop
from geojax.train.writing.background_writer import Put

_MOST_REASON = 300
"""Most characters of an error in the log of events."""


class StartSeconds:
    """Seconds before the first step by what they went into.

    Args:
        began: seconds since the epoch at which they begin.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self.spent: dict[Use, float] = {}

    @contextlib.contextmanager
    def timed(self, use: Use) -> Iterator[None]:
        """Count the seconds of the block."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.spent[use] = self.spent.get(use, 0.0) + time.monotonic() - began


class Attempt(NamedTuple):
    """The ledger and the events of an attempt, on the process that writes a run's files."""

    ledger: GoodputLedger
    events: EventLog

    @classmethod
    def begin(cls, folder: Path, put: Put, step: int, start: StartSeconds) -> "Attempt":
        """Begin the files of an attempt that goes on from `step` in a run directory.

        Args:
            folder: the run directory.
            put: writes in the background.
            step: the last step that was restored; 0 for a new run.
            start: the seconds so far.
        """
        ledger = GoodputLedger(folder, put, began=start.began, step=step)
        for use, seconds in start.spent.items():
            ledger.spend(use, seconds, START if use == "waiting" else None)
        rest = time.time() - start.began - sum(start.spent.values())
        ledger.spend("starting", max(rest, 0.0))
        events = EventLog(folder, put)
        kind: EventKind = "resume" if step else "start"
        number = ledger.attempt
        text = f"attempt {number} goes on from step {step}"
        events.note(step, kind, text, attempt=number)
        return cls(ledger, events)

    @contextlib.contextmanager
    def ending(self, loop: TrainingLoop[Any]) -> Iterator[None]:
        """Note how the training of the block ended."""
        ledger = self.ledger
        try:
            yield
        except BaseException as error:
            self.events.note(ledger.last_step, "end", f"failed: {_first_line(error)}")
            ledger.end("failed")
            raise
        if loop.stopped_early:
            self.events.note(ledger.last_step, "stop", "stopped on request; the state is saved")
        else:
            self.events.note(ledger.last_step, "end", "all steps are done")
        ledger.end("stopped" if loop.stopped_early else "end")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:_MOST_REASON] or type(error).__name__
