"""The trackers of a run: training hands them numbers, and waits for none of them."""

import functools
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import geojax
from geojax.checkpoint import RunDirectory
from geojax.errors import UserError
from geojax.json_file import load_json
from geojax.paths import write_atomically
from geojax.trackers.tracker_process import TrackerProcess, log_line
from geojax.trackers.tracker_settings import FileTracker, LibraryTracker, arguments_of
from geojax.train.writing.background_writer import BackgroundWriter

_CLOSING_SECONDS = 30.0
_ID = re.compile(r"[0-9a-f]{32}")


class _Fed(NamedTuple):
    """A tracker, and the thread that feeds it."""

    process: TrackerProcess
    writer: BackgroundWriter


class RunTrackers:
    """The trackers of a run with libraries, while they are entered.

    Each has a thread with a bounded queue, and a process. A tracker that fails, hangs or is too
    slow loses points, which warnings count at most once a minute and at the end.

    Args:
        trackers: those of the config; files are written by others.
        directory: the run's.
        files: writes the run's id.
        report: shows a line to the user.
        closing_seconds: time at the end for all of them together.
        process_of: makes the process of a tracker.
    """

    def __init__(
        self,
        trackers: Sequence[FileTracker | LibraryTracker],
        directory: RunDirectory,
        files: BackgroundWriter,
        report: Callable[[str], None],
        *,
        closing_seconds: float = _CLOSING_SECONDS,
        process_of: Callable[..., TrackerProcess] = TrackerProcess,
    ):
        self._directory, self._files, self._report = directory, files, report
        self._closing_seconds = closing_seconds
        self._fed = []
        for tracker in trackers:
            if isinstance(tracker, str):
                continue
            output = directory.trackers / f"{tracker.name.replace(':', '.')}.log"
            process = process_of(tracker.tracker, arguments_of(tracker), output)
            self._fed.append(_Fed(process, BackgroundWriter(f"tracker {tracker.name}", report)))
        self._id = self._read_id() if self._fed else ""
        self._is_started = False
        self.exit_code = 1
        """Exit code of the run, as far as it is known."""

    def start(self, name: str, config: Mapping[str, Any], step: int, site: str) -> None:
        """Start each tracker with the facts of a `TrackedRun`; a second call does nothing."""
        if self._is_started or not self._fed:
            return
        self._is_started = True
        self.keep_id()
        facts = {
            "name": name,
            "directory": str(self._directory.path),
            "config": config,
            "version": geojax.__version__,
            "step": step,
            "id": self._id,
            "site": site,
        }
        for process, writer in self._fed:
            writer.__enter__()
            writer.put("start", functools.partial(process.start, facts))
        self._report(f"trackers: what their libraries print is in {self._directory.trackers}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the numbers of a step to each tracker, at once."""
        if not self._is_started:
            return
        line = log_line(step, values)
        for process, writer in self._fed:
            writer.put("steps", functools.partial(process.log, line))

    def keep_id(self) -> None:
        """Write the id that the run keeps when it is started again."""
        if self._fed:
            self._files.put(self._directory.trackers.name, self._write_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *details: object) -> None:
        """Let all trackers end together, but wait for none of them for ever."""
        if not self._is_started:
            return
        deadline = time.monotonic() + self._closing_seconds
        exit_code = self.exit_code if kind is None else 1
        for process, writer in self._fed:
            writer.put_last("finish", functools.partial(process.finish, exit_code))
        for process, writer in self._fed:
            writer.end(deadline)
            process.kill()

    def _read_id(self) -> str:
        """Return the id of an earlier start, or else a new one.

        Raises:
            UserError: the file holds something else.
        """
        path = self._directory.trackers / "run.json"
        if not path.exists():
            return uuid.uuid4().hex
        kept = load_json(path).get("id")
        if not isinstance(kept, str) or not _ID.fullmatch(kept):
            raise UserError(
                f"{path}: holds no id of a run; remove the file, and trackers begin a new record"
            )
        return kept

    def _write_id(self) -> None:
        self._directory.trackers.mkdir(exist_ok=True)
        write_atomically(self._directory.trackers / "run.json", json.dumps({"id": self._id}) + "\n")
