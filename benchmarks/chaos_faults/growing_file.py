"""Lines of a file that a run appends to, and writes anew when it is started again."""

import json
import os
from pathlib import Path
from typing import Any


class GrowingFile:
    """The JSON lines that have come since the last look.

    Args:
        path: of the file, which need not be there yet.
    """

    def __init__(self, path: Path):
        self._path = path
        self._inode, self._read = 0, 0

    def new_lines(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the lines since the last call, and True if the file was written anew since."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return [], False
        is_new = bool(self._inode) and (status.st_ino != self._inode or status.st_size < self._read)
        if is_new or not self._inode:
            self._inode, self._read = status.st_ino, 0
        if status.st_size == self._read:
            return [], is_new
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino != self._inode:
                    return [], is_new  # replaced meanwhile: the next look finds it
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return [], is_new
        self._read += len(whole) + bool(whole)
        lines = []
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                lines.append(line)
        return lines, is_new
