"""Events of a run, one JSON object a line in `events.jsonl`: what happened, when and why."""

import json
import time
from pathlib import Path
from typing import Literal

from geojax.run_paths import EVENTS
from geojax.train.writing.appended_file import AppendedFile
from geojax.train.writing.background_writer import Put

EventKind = Literal[
    "start",
    "resume",
    "compiled",
    "save",
    "failed_save",
    "validation",
    "spike",
    "skipped",
    "replan",
    "late",
    "deviation",
    "lost",
    "back",
    "stop",
    "end",
]


class EventLog:
    """The log of a run's events, on the process that writes its files; it only grows."""

    def __init__(self, folder: Path, put: Put) -> None:
        """Open the log of the run directory `folder`; `put` writes in the background."""
        self._file, self._put = AppendedFile(folder / EVENTS), put

    def note(self, step: int, kind: EventKind, text: str, **more: int | float | str) -> None:
        """Note an event of `step` in one line for a person; `more` is for scripts."""
        event = {"time": round(time.time(), 3), "step": step, "kind": kind, "text": text, **more}
        line = f"{json.dumps(event)}\n".encode()
        self._put(EVENTS, lambda: self._file.append(line))
