"""What the sites of a run write down, with the time at which it was seen."""

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from chaos_faults.growing_file import GrowingFile
from geojax.run_paths import EVENTS, METRICS

_LOOK_SECONDS = 0.01


class StepSeen(NamedTuple):
    """A step that a site has done."""

    time: float
    """Seconds on the system's clock, as the site gives it."""
    site: int
    step: int
    loss: float | None
    seconds: float
    """Time from the end of the step before to the end of this one, as the site measures it.

    The line comes when the site has computed the next step too.
    """


class EventSeen(NamedTuple):
    """An event that a site has written down."""

    time: float
    """Seconds on the system's clock, as the site gives it."""
    site: int
    step: int
    kind: str
    text: str


class Sightings:
    """All steps and events of a run, taken in by a thread while it is entered.

    Args:
        folders: of each site's metrics and events.
    """

    def __init__(self, folders: Sequence[Path]):
        self.steps: list[StepSeen] = []
        self.events: list[EventSeen] = []
        self.conflicts: list[str] = []
        """Steps with two losses."""
        self.losses: dict[int, float] = {}
        self._metrics = [GrowingFile(folder / METRICS) for folder in folders]
        self._events = [GrowingFile(folder / EVENTS) for folder in folders]
        self._known: list[set[int]] = [set() for _ in folders]
        """Steps that each site has written."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sightings", daemon=True)

    def __enter__(self) -> "Sightings":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def newest(self, site: int) -> StepSeen | None:
        """Return the last step that a site was seen to do."""
        return next((seen for seen in reversed(self.steps) if seen.site == site), None)

    def steps_of(self, site: int, since: float) -> list[StepSeen]:
        """Return a site's steps from a time on."""
        return [seen for seen in self.steps if seen.site == site and seen.time >= since]

    def events_since(self, since: float, kind: str) -> list[EventSeen]:
        """Return the events of a kind, from a time on."""
        return [seen for seen in self.events if seen.kind == kind and seen.time >= since]

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                self.look()

    def look(self) -> None:
        """Take in what is new."""
        for site, (metrics, events) in enumerate(zip(self._metrics, self._events, strict=True)):
            lines, is_new = metrics.new_lines()
            for line in lines:
                self._take(site, line, is_new)
            for line in events.new_lines()[0]:
                with contextlib.suppress(KeyError, TypeError):
                    values = (float(line["time"]), site, int(line["step"]))
                    self.events.append(EventSeen(*values, str(line["kind"]), str(line["text"])))

    def _take(self, site: int, line: dict[str, Any], is_new: bool) -> None:
        step, loss = line.get("step"), line.get("loss")
        seen_at, seconds = line.get("time"), line.get("seconds")
        numbers = isinstance(seen_at, float) and isinstance(seconds, float)
        if not isinstance(step, int) or "loss" not in line or not numbers:
            return
        if is_new and step in self._known[site]:
            return  # a restart keeps it
        self._known[site].add(step)
        self.steps.append(StepSeen(seen_at, site, step, loss, seconds))
        if loss is not None and self.losses.setdefault(step, loss) != loss:
            text = f"step {step}: {loss!r} at site {site}, {self.losses[step]!r} before"
            self.conflicts.append(text)
