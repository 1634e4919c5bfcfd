"""Metrics of a run on disk: one JSON line a step, and TensorBoard."""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from geojax.checkpoint import RunDirectory
from geojax.errors import UserError, is_disk_full
from geojax.train.run_trackers import RunTrackers
from geojax.train.writing.appended_file import AppendedFile
from geojax.train.writing.background_writer import BackgroundWriter
from geojax.train.writing.event_file import event_file, scalars_record


class MetricsWriter:
    """A writer of `metrics.jsonl` and a TensorBoard log, on one process of a run.

    A resumed run continues the file: lines of steps after the restored one, which the interrupted
    run still wrote, are dropped, so that every step stands in the file once. After that training
    only hands lines over, and a disk that takes none costs those lines.
    """

    def __init__(
        self,
        directory: RunDirectory,
        step: int,
        files: BackgroundWriter,
        *,
        process: int = 0,
        tensorboard: bool = True,
        trackers: RunTrackers | None = None,
    ):
        """Open the files of a run that goes on from `step`.

        Args:
            directory: the run's.
            step: the last step that was restored; 0 for a new run.
            files: writes them.
            process: index of the process whose metrics they are.
            tensorboard: write the TensorBoard log.
            trackers: get the same numbers; None: there are none.

        Raises:
            UserError: the files of an earlier run are no metrics, or cannot be written. (A full
                disk is a warning.)
        """
        self._path = directory.metrics_of(process)
        ends = (end for line, end in _lines(self._path) if step and line["step"] <= step)
        kept = max(ends, default=0)
        self._directory, self._files, self._trackers = directory, files, trackers
        self._lines = _Opened(functools.partial(_shortened, self._path, kept))
        purged_from = step + 1 if step else None
        self._events = None
        if tensorboard:
            self._events = _Opened(
                functools.partial(_point_file, directory.tensorboard, purged_from)
            )
        try:
            self._lines.open()
            if self._events is not None:
                self._events.open()
        except OSError as error:
            if not is_disk_full(error):
                raise UserError(
                    f"{self._path}: metrics cannot be written ({error.strerror}); a run "
                    "needs a directory in which it may write"
                ) from None

    def open_again(self, config: Mapping[str, Any]) -> None:
        """Begin new files, with the run's `config`, where its directory has been made again."""
        directory = self._directory
        self._lines = _Opened(functools.partial(_shortened, self._path, 0))
        if self._events is not None:
            self._events = _Opened(functools.partial(_point_file, directory.tensorboard, None))
        if self._trackers is not None:
            self._trackers.keep_id()
        self._files.put(directory.config.name, functools.partial(directory.write_config, config))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` (numbers) of `step`, soon.

        JSON knows no infinity: a number that is not finite is written as null, and not drawn.
        """
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step, **{name: finite.get(name) for name in values}}
        text = (json.dumps(line) + "\n").encode()
        lines, events = self._lines, self._events
        self._files.put(self._path.name, lambda: lines.append(text))
        if events is not None:
            self._files.put(
                self._directory.tensorboard.name,
                lambda: events.append(scalars_record(step, finite)),
            )
        if self._trackers is not None:
            self._trackers.log(step, values)


class _Opened:
    """A file of records that is opened when the disk first lets it."""

    def __init__(self, open_file: Callable[[], AppendedFile]):
        self._open_file = open_file
        self._file: AppendedFile | None = None

    def open(self) -> AppendedFile:
        if self._file is None:
            self._file = self._open_file()
        return self._file

    def append(self, record: bytes) -> None:
        self.open().append(record)


def _shortened(jsonl: Path, kept: int) -> AppendedFile:
    """Cut a file of lines off behind the bytes that a resumed run keeps."""
    with jsonl.open("ab") as file:
        file.truncate(kept)
    return AppendedFile(jsonl)


def _point_file(folder: Path, purged_from: int | None) -> AppendedFile:
    folder.mkdir(exist_ok=True)
    return event_file(folder, purged_from)


def read_metrics(jsonl: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`, without a last line that a crash cut off.

    Raises:
        UserError: another line is no metrics of a step.
    """
    return (values for values, _ in _lines(jsonl))


def _lines(jsonl: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each line, and the bytes of the file up to its end.

    A run of a million steps has a gigabyte of lines: one of them at a time is in memory.
    """
    damaged, end = None, 0
    with contextlib.suppress(FileNotFoundError), jsonl.open("rb") as file:
        for number, text in enumerate(file, start=1):
            if damaged is not None:
                raise UserError(
                    f"{jsonl}:{damaged}: is no line of metrics; move the file away, and the run "
                    "begins a new one"
                )
            end += len(text)
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield line, end
            else:
                damaged = number
