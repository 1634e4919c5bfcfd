"""Progress of long work on data: a bar on a terminal, and else a line now and then."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

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

    def __init__(self, bar: Progress) -> None:
        """Take the bar that shows the steps; it may be disabled."""
        self._bar = bar
        self._description, self._done, self._total = "", 0, 0
        self._began = time.monotonic()

    def begin(self, description: str, total: int | None = None) -> Callable[[int], None]:
        """Begin a step of `total` bytes, or of unknown length; call the result with bytes done."""
        task = self._bar.add_task(description, total=total)
        self._description, self._done, self._total = description, 0, total or 0

        def advance(bytes_done: int) -> None:
            self._done += bytes_done
            self._bar.advance(task, bytes_done)

        return advance

    @property
    def line(self) -> str:
        """The step that is under way, in one line."""
        words = self._description
        if self._total:
            words += f": {quantity(self._done, 'B')} of {quantity(self._total, 'B')}"
        return f"{words}, {time.monotonic() - self._began:.0f} s"


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
    progress = WorkProgress(bar)
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
