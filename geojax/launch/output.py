"""What the processes of a run print, line by line, each line marked with who printed it."""

import contextlib
import os
from collections import deque
from collections.abc import Iterable
from typing import TextIO

from geojax.launch.workers import Member

_COLOURS = (36, 33, 35, 32, 34, 31)
_LINES_KEPT = 100


class Output:
    """Writes marked lines to `out` and `err`, in colour where these are terminals.

    `closed` tells that nobody reads them any more (`geojax launch ... | head`).
    """

    def __init__(self, members: Iterable[Member], out: TextIO, err: TextIO):
        members = list(members)
        self.closed = False
        self._out, self._err = out, err
        self._width = max(len(member.label) for member in members)
        self._colours = {
            member.process: _COLOURS[place % len(_COLOURS)] for place, member in enumerate(members)
        }
        self._last: dict[int, deque[str]] = {
            member.process: deque(maxlen=_LINES_KEPT) for member in members
        }

    def line(self, member: Member, text: str, *, error: bool) -> None:
        """A line that `member` wrote to its standard output or, with `error`, standard error."""
        # What overwrites itself on a terminal, such as a progress bar, ends as its last state.
        text = text.rstrip("\r").rpartition("\r")[2]
        self._last[member.process].append(text)
        self._write(self._err if error else self._out, member, text)

    def last_lines(self, member: Member) -> list[str]:
        """The newest lines of both kinds that `member` wrote."""
        return list(self._last[member.process])

    def repeat(self, member: Member, count: int) -> None:
        """Show the last `count` lines of `member` again, on standard error."""
        for text in self.last_lines(member)[-count:]:
            self._write(self._err, member, text, indent="  ")

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self._emit(self._err, f"geojax launch: {text}")

    def _write(self, stream: TextIO, member: Member, text: str, indent: str = "") -> None:
        mark = f"{member.label:{self._width}} |"
        if _wants_colour(stream):
            mark = f"\033[{self._colours[member.process]}m{mark}\033[0m"
        self._emit(stream, f"{indent}{mark} {text}")

    def _emit(self, stream: TextIO, line: str) -> None:
        if self.closed:
            return
        try:
            print(line, file=stream, flush=True)
        except (OSError, ValueError):
            self.closed = True


def _wants_colour(stream: TextIO) -> bool:
    with contextlib.suppress(ValueError):  # a closed stream
        return stream.isatty() and not os.environ.get("NO_COLOR")
    return False
