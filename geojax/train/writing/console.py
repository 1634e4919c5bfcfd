"""The console of a run, which output that cannot be written does not hold up.

The output of a job goes to a file as often as not, perhaps on the disk that is full.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, TextIO, cast

import rich.console

from geojax.train.writing.background_writer import BackgroundWriter


class _Stream:
    """A text stream that hands its text to a thread; it says where some is missing."""

    def __init__(self, target: TextIO, writer: BackgroundWriter):
        self._target, self._writer = target, writer
        self._told = 0
        self.encoding = getattr(target, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        self._writer.put("output", lambda: self._write(text))
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread leaves nothing in a buffer."""

    def isatty(self) -> bool:
        return False

    def _write(self, text: str) -> None:
        lost = self._writer.lost
        if lost > self._told:
            text = f"\nwarning: {lost - self._told} pieces of the output are missing here\n{text}"
        _write_all(self._target, text)
        self._told = lost


def _write_all(target: TextIO, text: str) -> None:
    """Write to the descriptor: a buffer would keep what failed, and fail again as Python ends."""
    try:
        descriptor = target.fileno()
    except (OSError, ValueError):  # a stream of a test or of a notebook
        target.write(text)
        target.flush()
        return
    content = text.encode(target.encoding, errors="replace")
    while content:
        content = content[os.write(descriptor, content) :]


@contextlib.contextmanager
def run_console(*, quiet: bool) -> Iterator[rich.console.Console]:
    """Make the console of a run; a terminal is written to directly."""
    with contextlib.ExitStack() as stack:
        file = None
        if not quiet and not sys.stdout.isatty():
            sys.stdout.flush()
            writer = BackgroundWriter("the output", lambda line: None)
            # Of a file rich wants to write and to flush, no more.
            file = cast(IO[str], _Stream(sys.stdout, stack.enter_context(writer)))
        yield rich.console.Console(
            file=file,
            quiet=quiet,
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
