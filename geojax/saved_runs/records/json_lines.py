"""A file of JSON lines that is followed while another process appends to it, or writes it anew."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from geojax.saved_runs.records.run_files import FileMark, RunFiles

Line = Mapping[str, Any]

_PIECE = 1 << 20
_LONGEST_LINE = 1 << 20
_FINGERPRINT = 64
_SAMPLES = 500
_SAMPLE = 8192
_TAIL = 1 << 20
_MOST_RARE = 1000


class FollowedLines:
    """The lines of a file, each of which is handed over once.

    A file that another process wrote anew is read from its beginning: it is shorter, or the bytes
    before the place of reading changed.

    Args:
        files: the run's.
        name: the file's.
        add: takes a line.
        restart: is called before a file is read anew.
        whole_bytes: size of the largest file of which every line is read. Of a larger one the last
            lines are read, and samples before them; None: every line of any file.
        rare: text of lines that are read wherever they stand.
    """

    def __init__(
        self,
        files: RunFiles,
        name: str,
        add: Callable[[Line], None],
        restart: Callable[[], None],
        whole_bytes: int | None = None,
        rare: bytes | None = None,
    ) -> None:
        self._files, self._name = files, name
        self._add, self._restart = add, restart
        self._whole_bytes, self._rare = whole_bytes, rare
        self._offset, self._before, self._rest = 0, b"", b""
        self.unreadable = 0
        """Lines that are no JSON object."""

    def poll(self, mark: FileMark | None) -> bool:
        """Hand over the lines that are new; return True if the file is another or has new ones.

        Args:
            mark: the file's; None: it is not there.
        """
        size = 0 if mark is None else mark.size
        if size < self._offset or self._is_other():
            self._offset, self._before, self._rest, self.unreadable = 0, b"", b"", 0
            self._restart()
            self.poll(mark)
            return True
        if size == self._offset:
            return False
        if not self._offset and self._whole_bytes is not None and size > self._whole_bytes:
            self._sample(size)
        while self._offset < size:
            piece = self._files.read(self._name, self._offset, min(_PIECE, size - self._offset))
            if not piece:
                break
            self._take(piece)
        return True

    def _is_other(self) -> bool:
        start = self._offset - len(self._before)
        before = self._before
        return bool(before) and self._files.read(self._name, start, len(before)) != before

    def _take(self, piece: bytes) -> None:
        """Hand over the whole lines of the next bytes; the rest waits for more."""
        self._offset += len(piece)
        self._before = (self._before + piece)[-_FINGERPRINT:]
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            self._rest = b""
        for line in lines:
            self._hand_over(line)

    def _sample(self, size: int) -> None:
        """Read pieces of a large file, and go on a little before its end."""
        tail = size - _TAIL
        for number in range(_SAMPLES):
            piece = self._files.read(self._name, tail * number // _SAMPLES, _SAMPLE)
            # A piece begins and ends within a line, but for the first.
            lines = piece.split(b"\n")[1 if number else 0 : -1]
            for line in lines:
                self._hand_over(line)
        if self._rare is not None:
            for line in self._files.lines_with(self._name, self._rare, _MOST_RARE).split(b"\n"):
                self._hand_over(line)
        head, _, _ = self._files.read(self._name, tail, _LONGEST_LINE).partition(b"\n")
        self._offset = tail + len(head) + 1

    def _hand_over(self, line: bytes) -> None:
        if not line.strip():
            return
        content = parsed(line)
        if content is None:
            self.unreadable += 1
        else:
            self._add(content)


def parsed(text: bytes) -> dict[str, Any] | None:
    """Read a JSON object; None: it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
