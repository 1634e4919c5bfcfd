"""Progress of long work on data: a bar on a terminal, and else a line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from geojax.quantities import quantity

_FIRST_SECONDS = 1.0
_SECONDS_BETWEEN_LINES = 15.0


class WorkProgress:
    """The steps of a piece of work, of which the last one begun is under way."""

    def __init__(self, bar: Progress, *, enabled: bool) -> None:
        """Take the bar that shows the steps, which may be disabled without lines being so."""
        self._enabled = enabled
        self._bar = bar
        self._description, self._done, self._total = "", 0, 0
        self._began = self._step_began = time.monotonic()

    def begin(self, description: str, total: int | None = None) -> Callable[[int], None]:
        """Begin a step of `total` bytes, or of unknown length; call the result with bytes done."""
        task = self._bar.add_task(description, total=total)
        self._description, self._done, self._total = description, 0, total or 0
        self._step_began = time.monotonic()

        def advance(bytes_done: int) -> None:
            self._done += bytes_done
            self._bar.advance(task, bytes_done)

        return advance

    def say(self, line: str) -> None:
        """Show a line beside the progress."""
        if self._enabled:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def line(self) -> str:
        """The step that is under way, in one line: how far it is, its rate, and the time left."""
        now = time.monotonic()
        words = self._description
        if self._total:
            words += f": {quantity(self._done, 'B')} of {quantity(self._total, 'B')}"
            seconds = now - self._step_began
            if self._done and seconds > 0:
                rate = self._done / seconds
                left = max(self._total - self._done, 0) / rate
                words += f", {quantity(rate, 'B')}/s, {timedelta(seconds=int(left))} left"
        return f"{words}, {now - self._began:.0f} s"


@contextlib.contextmanager
def work_progress(*, enabled: bool) -> Iterator[WorkProgress]:
    """Show progress on stderr while the block runs: on a terminal a bar, and else lines.

    What is done within a second has no line.
    """
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not enabled or not console.is_terminal,
    )
    progress = WorkProgress(bar, enabled=enabled)
    ended = threading.Event()

    def write_lines() -> None:
        wait = _FIRST_SECONDS
        while not ended.wait(wait):
            wait = _SECONDS_BETWEEN_LINES
            with contextlib.suppress(OSError, ValueError):  # nobody may be reading any more
                print(progress.line, file=sys.stderr, flush=True)

    thread = threading.Thread(target=write_lines, daemon=True)
    with bar:
        if enabled and not console.is_terminal:
            thread.start()
        try:
            yield progress
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
