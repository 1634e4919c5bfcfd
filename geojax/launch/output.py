"""Output of a run's workers, line by line, each line marked with the worker that printed it."""

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterable
from typing import TextIO

from geojax.launch.workers import Worker

_COLORS = (36, 33, 35, 32, 34, 31)
_LINES_KEPT = 100
_PROGRESS = re.compile(r"step (\d{1,15})/\d+  ")
"""Beginning of a line of progress, as `geojax.train.report` writes it."""
_MOST_HIDDEN = 2
"""Lines of progress of another site that are hidden without one of the first site between them."""


class Output:
    """Marked lines on `out` and `err`, in color where these are terminals.

    `closed` becomes True when their reader has gone (`geojax launch ... | head`).

    Args:
        workers: those that write.
        out: gets what they write to standard output.
        err: gets what they write to standard error, and the launcher's own lines.
        merges_progress: lines of progress of the first site have the figures of all sites, so that
            those of others are hidden while it goes on.
    """

    def __init__(
        self,
        workers: Iterable[Worker],
        out: TextIO,
        err: TextIO,
        *,
        merges_progress: bool = False,
    ):
        workers = list(workers)
        self.closed = False
        self._out, self._err = out, err
        self._width = max(len(worker.label) for worker in workers)
        self._colors = {
            worker.process: _COLORS[index % len(_COLORS)] for index, worker in enumerate(workers)
        }
        self._first, self._merges_progress = workers[0].process, merges_progress
        self._hidden: dict[int, int] = {}
        """Lines of progress of each worker since the last one of the first; {}: it has had none."""
        self._steps: dict[int, int] = {}
        self._last: dict[int, deque[str]] = {
            worker.process: deque(maxlen=_LINES_KEPT) for worker in workers
        }

    def line(self, worker: Worker, text: str, *, error: bool) -> None:
        """Show a line that `worker` wrote to its standard output or, if `error`, standard error."""
        # What overwrites itself on a terminal, such as a progress bar, ends as its last state.
        text = text.rstrip("\r").rpartition("\r")[2]
        self._last[worker.process].append(text)
        progress = _PROGRESS.match(text)
        if progress is not None:
            self._steps[worker.process] = int(progress[1])
            if self._merges_progress and self._hides(worker):
                return
        self._write(self._err if error else self._out, worker, text)

    def _hides(self, worker: Worker) -> bool:
        """Tell if a worker's line of progress is to be hidden."""
        if worker.process == self._first:
            self._hidden = dict.fromkeys(self._last, 0)
            return False
        if not self._hidden or self._hidden[worker.process] >= _MOST_HIDDEN:
            return False
        self._hidden[worker.process] += 1
        return True

    def begin(self, worker: Worker) -> None:
        """Forget the last lines of a worker and its steps: it is started again."""
        self._last[worker.process].clear()
        self._steps.pop(worker.process, None)

    def last_lines(self, worker: Worker) -> list[str]:
        """Return the newest lines that `worker` wrote to either stream."""
        return list(self._last[worker.process])

    def newest_step(self, worker: Worker) -> int:
        """Return the step of a worker's newest line of progress since its start; 0: none."""
        return self._steps.get(worker.process, 0)

    def repeat(self, worker: Worker, count: int) -> None:
        """Show the last `count` lines of `worker` again, on standard error."""
        for text in self.last_lines(worker)[-count:]:
            self._write(self._err, worker, text, indent="  ")

    def log(self, text: str) -> None:
        """Show a line of the launcher itself, on standard error."""
        self._emit(self._err, f"geojax launch: {text}")

    def _write(self, stream: TextIO, worker: Worker, text: str, indent: str = "") -> None:
        mark = f"{worker.label:{self._width}} |"
        if _wants_color(stream):
            mark = f"\033[{self._colors[worker.process]}m{mark}\033[0m"
        self._emit(stream, f"{indent}{mark} {text}")

    def _emit(self, stream: TextIO, line: str) -> None:
        if self.closed:
            return
        try:
            print(line, file=stream, flush=True)
        except (OSError, ValueError):
            self.closed = True


def _wants_color(stream: TextIO) -> bool:
    with contextlib.suppress(ValueError):  # a closed stream
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return False
