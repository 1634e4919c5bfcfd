"""All that the directory of a run tells, followed while the run goes on."""

import collections
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from geojax.errors import UserError
from geojax.paths import resolved_path
from geojax.run_paths import CONFIG, EVENTS, GOODPUT, GOODPUT_NOW, METRICS, STEP
from geojax.saved_runs.records.attempt_records import (
    AttemptRecord,
    EventRecord,
    Goodput,
    in_order,
)
from geojax.saved_runs.records.curves import Curves, ThinnedValues
from geojax.saved_runs.records.json_lines import FollowedLines, Line, parsed
from geojax.saved_runs.records.plan_record import MOST_STEP_BYTES, PlanRecord, parsed_yaml
from geojax.saved_runs.records.run_files import (
    FileMark,
    LocalFiles,
    RunFiles,
    earlier_config_number,
)
from geojax.saved_runs.records.step_record import PARTS, VALIDATION, StepRecord

_RECENT_STEPS = 200
_MOST_EVENTS = 5000
_MOST_ATTEMPTS = 2000
_MOST_CONFIG_BYTES = 1 << 19
_MOST_CONFIGS = 50


class Detail(NamedTuple):
    """Bounds of what is kept of a run."""

    points: int
    """Most points of a curve."""
    whole_bytes: int | None
    """Size of the largest metrics.jsonl of which every line is read; None: any."""


LIVE = Detail(600, 1 << 24)
"""A view on a terminal: of a large file samples and the end."""
FULL = Detail(2000, None)
"""A page: every line."""


_DRAWN = frozenset(
    (
        *("loss", "gradient_norm", "seconds", "tokens_per_second", "mfu", "time"),
        *("memory/peak_bytes", "memory/limit_bytes", "slowest/seconds"),
        *(f"seconds/{part}" for part in PARTS),
    )
)


@functools.lru_cache(1 << 12)
def _is_drawn(name: str) -> bool:
    """Tell metrics whose course somebody looks at from all others."""
    if name in _DRAWN or name.startswith(VALIDATION):
        return True
    return name.startswith("link/") and "/wait_seconds_" not in name


class DirectoryRecord:
    """Contents of one directory: of a run, or of one of its sites."""

    def __init__(self, files: RunFiles, prefix: str, detail: Detail) -> None:
        """Read nothing yet; `prefix` stands before names of files: "" or "west/"."""
        self._files, self._prefix, self._detail = files, prefix, detail
        self._read: dict[str, FileMark] = {}
        self._metrics = FollowedLines(
            files,
            prefix + METRICS,
            self._add_step,
            self._forget_steps,
            detail.whole_bytes,
            f'"{VALIDATION}'.encode(),
        )
        self._events = FollowedLines(
            files, prefix + EVENTS, self._add_event, self._forget_events, detail.whole_bytes
        )
        self._attempts = FollowedLines(
            files, prefix + GOODPUT, self._add_attempt, self._forget_attempts, detail.whole_bytes
        )
        self.config: Mapping[str, Any] = {}
        """The resolved config; empty if it is not there."""
        self.earlier_configs: dict[int, Mapping[str, Any]] = {}
        """Configs of earlier attempts by number, where they differ."""
        self.planned: PlanRecord | None = None
        """The resolved step; None if it is not there."""
        self._over: collections.deque[AttemptRecord] = collections.deque(maxlen=_MOST_ATTEMPTS)
        self._current: AttemptRecord | None = None
        self._forget_steps()
        self._forget_events()

    def poll(self, marks: Mapping[str, FileMark]) -> bool:
        """Read what is new in the run's files; return True if anything is."""
        of_files = {
            name.removeprefix(self._prefix): mark
            for name, mark in marks.items()
            if name.rpartition("/")[0] == self._prefix.rstrip("/")
        }
        new = [
            self._metrics.poll(of_files.get(METRICS)),
            self._events.poll(of_files.get(EVENTS)),
            self._attempts.poll(of_files.get(GOODPUT)),
        ]
        configs = [name for name in of_files if earlier_config_number(name) is not None]
        for name in (CONFIG, STEP, GOODPUT_NOW, *sorted(configs)[:_MOST_CONFIGS]):
            mark = of_files.get(name)
            if mark is not None and self._read.get(name) != mark:
                self._read[name] = mark
                self._read_whole(name, mark.size)
                new.append(True)
            elif mark is None and self._read.pop(name, None) is not None:
                new.append(True)
                if name == GOODPUT_NOW:
                    self._current = None
        return any(new)

    def _read_whole(self, name: str, size: int) -> None:
        """Read a small file that its writer replaces as a whole."""
        most = MOST_STEP_BYTES if name == STEP else _MOST_CONFIG_BYTES
        if size > most:
            return
        text = self._files.read(self._prefix + name, 0, most)
        if name == GOODPUT_NOW:
            content = parsed(text)
            if content is not None:
                self._current = AttemptRecord.of(content, is_over=False)
        elif name == STEP:
            self.planned = PlanRecord.parse(text.decode(errors="replace"))
        else:
            config = parsed_yaml(text.decode(errors="replace")) or {}
            number = earlier_config_number(name)
            if number is None:
                self.config = config
            else:
                self.earlier_configs[number] = config

    def _forget_steps(self) -> None:
        self.curves = Curves(self._detail.points)
        """Values of the metrics over the steps."""
        self.seconds = ThinnedValues()
        """Seconds of the steps."""
        self.recent: collections.deque[StepRecord] = collections.deque(maxlen=_RECENT_STEPS)
        """The last steps."""
        self.validation: dict[str, tuple[int, float]] = {}
        """The last validation losses, with their steps."""
        self.new_steps: collections.deque[StepRecord] = collections.deque(maxlen=_RECENT_STEPS)
        """Lines of metrics since `take_news`."""
        self.first_time: float | None = None
        """Seconds since the epoch at which the first known step ended."""
        self.steps_seen = 0

    def _add_step(self, line: Line) -> None:
        record = StepRecord.of(line)
        if record is None:
            self._metrics.unreadable += 1
            return
        drawn = {name: value for name, value in record.values.items() if _is_drawn(name)}
        self.curves.add(record.step, drawn)
        for name, loss in record.validation.items():
            if record.step >= self.validation.get(name, (0, 0.0))[0]:
                self.validation[name] = record.step, loss
        self.new_steps.append(record)
        if not record.is_of_training:
            return
        self.steps_seen += 1
        self.recent.append(record)
        if (seconds := record.values.get("seconds")) is not None:
            self.seconds.add(seconds)
        if self.first_time is None:
            self.first_time = record.values.get("time")

    def _forget_events(self) -> None:
        self.events: collections.deque[EventRecord] = collections.deque(maxlen=_MOST_EVENTS)
        """The last events."""
        self.new_events: collections.deque[EventRecord] = collections.deque(maxlen=_RECENT_STEPS)
        """Events since `take_news`."""

    def _add_event(self, line: Line) -> None:
        event = EventRecord.of(line)
        if event is None:
            self._events.unreadable += 1
            return
        self.events.append(event)
        self.new_events.append(event)

    def _forget_attempts(self) -> None:
        self._over.clear()

    def _add_attempt(self, line: Line) -> None:
        attempt = AttemptRecord.of(line, is_over=True)
        if attempt is None:
            self._attempts.unreadable += 1
            return
        self._over.append(attempt)

    @property
    def attempts(self) -> tuple[AttemptRecord, ...]:
        """Attempts by their beginning; the last may go on."""
        return in_order(self._over, self._current)

    @property
    def goodput(self) -> Goodput | None:
        """Uses of the time so far; None: nothing tells them."""
        return Goodput.of(self.attempts)

    @property
    def latest(self) -> StepRecord | None:
        """The last step; None before the first."""
        return self.recent[-1] if self.recent else None

    @property
    def steps(self) -> int | None:
        """Steps of the whole run; None: not known."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    @property
    def unreadable_lines(self) -> int:
        """Lines that are no records."""
        followed = (self._metrics, self._events, self._attempts)
        return sum(lines.unreadable for lines in followed)

    @property
    def has_ended(self) -> bool:
        """True if the run says that it is done or was stopped, or has done all of its steps."""
        for event in reversed(self.events):
            if event.kind in ("start", "resume", "end", "stop"):
                return event.kind in ("end", "stop")
        return self.latest is not None and self.steps is not None and self.latest.step >= self.steps

    def known(self, name: str) -> float | None:
        """Return the newest value of a metric that not every step has; None: none of the last."""
        for record in reversed(self.recent):
            if name in record.values:
                return record.values[name]
        return None


class RunRecord:
    """A run's directory and those of its sites.

    Args:
        files: the run's.
        detail: bounds of what is kept.
    """

    def __init__(self, files: RunFiles, detail: Detail) -> None:
        self._files, self._detail = files, detail
        self.sites: dict[str, DirectoryRecord] = {}
        """Contents of the sites' directories."""
        self._root = DirectoryRecord(files, "", detail)

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read all that a run's directory tells now.

        Raises:
            UserError: there is no such directory, or it tells of no step.
        """
        record = cls(LocalFiles(resolved_path(folder)), FULL)
        record.poll()
        if not record.main.steps_seen:
            raise UserError(
                f"{folder}: no {METRICS} with a step of a run; name a run's directory "
                "(run_directory of its config)"
            )
        return record

    def poll(self) -> bool:
        """Read what is new; return True if anything is."""
        marks = self._files.marks()
        new = self._root.poll(marks)
        for name in sorted(marks):
            site, slash, _ = name.partition("/")
            if slash and site not in self.sites:
                detail = self._detail if self._root_is_empty and not self.sites else LIVE
                self.sites[site] = DirectoryRecord(self._files, f"{site}/", detail)
        return any([new, *[directory.poll(marks) for directory in self.sites.values()]])

    @property
    def _root_is_empty(self) -> bool:
        return not self._root.recent and not self._root.config

    @property
    def main_site(self) -> str | None:
        """Name of the site whose directory `main` is; None: it is the run's own."""
        if not self._root_is_empty:
            return None
        with_steps = [site for site in sorted(self.sites) if self.sites[site].recent]
        return next(iter(with_steps or sorted(self.sites)), None)

    @property
    def main(self) -> DirectoryRecord:
        """The directory that tells of the run: its own, or with islands the first site's."""
        site = self.main_site
        return self._root if site is None else self.sites[site]

    @property
    def is_there(self) -> bool:
        """True if the directory tells anything of a run."""
        main = self.main
        return bool(main.recent or main.config or main.events)
