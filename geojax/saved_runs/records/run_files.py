"""Files of a run directory, which are read in pieces and never written."""

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from geojax.errors import UserError
from geojax.network_names import is_site_name
from geojax.run_paths import CONFIG, EVENTS, FOLDERS, GOODPUT, GOODPUT_NOW, METRICS, STEP

_EARLIER_CONFIG = re.compile(r"config\.(\d{1,6})\.yaml")
_FILES = (METRICS, EVENTS, GOODPUT, GOODPUT_NOW, CONFIG, STEP)
_PIECE = 1 << 22
_MOST_SITES = 64


class FileMark(NamedTuple):
    """A file at a moment; another mark means that it changed."""

    size: int
    modified: int
    """Time of the last change, in a unit of the file system's."""


class RunFiles(Protocol):
    """Files of a run directory and of its sites' directories, by name: `metrics.jsonl`."""

    def marks(self) -> Mapping[str, FileMark]:
        """Return the files that tell of the run; none before it has begun."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer at the end of the file, or if it is gone."""

    def lines_with(self, name: str, text: bytes, most: int) -> bytes:
        """Return the last `most` lines of a file that hold `text`."""

    def close(self) -> None:
        """Stop reading."""


def is_of_run(name: str) -> bool:
    """Tell the files that are read from all others: `metrics.jsonl`, `west/metrics.jsonl`."""
    folder, slash, file = name.rpartition("/")
    if slash and (folder in FOLDERS or not is_site_name(folder)):
        return False
    return file in _FILES or _EARLIER_CONFIG.fullmatch(file) is not None


def earlier_config_number(file: str) -> int | None:
    """Return n of `config.<n>.yaml`; None: it is another file."""
    matched = _EARLIER_CONFIG.fullmatch(file)
    return None if matched is None else int(matched[1])


class LocalFiles:
    """Files of a run directory on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def marks(self) -> dict[str, FileMark]:
        """Return the files that tell of the run; none before it has begun."""
        found: dict[str, FileMark] = {}
        folders = self._look(self._folder, "", found)
        for site in sorted(folders)[:_MOST_SITES]:
            self._look(self._folder / site, f"{site}/", found)
        return found

    def _look(self, folder: Path, prefix: str, found: dict[str, FileMark]) -> list[str]:
        """Add the marks of a folder's files, and return the names of its sites' folders.

        Raises:
            UserError: the run's own folder cannot be read.
        """
        folders = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if not prefix and is_site_name(entry.name) and entry.name not in FOLDERS:
                        folders.append(entry.name)
                    if is_of_run(prefix + entry.name):
                        with contextlib.suppress(OSError):  # it is being replaced, or leads nowhere
                            status = os.stat(entry.path)
                            if stat.S_ISREG(status.st_mode):
                                mark = FileMark(status.st_size, status.st_mtime_ns)
                                found[prefix + entry.name] = mark
        except (FileNotFoundError, NotADirectoryError):
            return folders
        except OSError as error:
            if prefix:  # another folder than a site's
                return folders
            raise UserError(
                f"{folder}: cannot be read ({error.strerror}); name a run's directory that this "
                "user may read"
            ) from None
        return folders

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Read up to `length` bytes; fewer at the end of the file, or if it is gone."""
        try:
            with (self._folder / name).open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read(length)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UserError(
                f"{self._folder / name}: cannot be read ({error.strerror}); a report needs a file "
                "that this user may read"
            ) from None

    def lines_with(self, name: str, text: bytes, most: int) -> bytes:
        """Return the last `most` lines of a file that hold `text`."""
        mark = self.marks().get(name)
        end = 0 if mark is None else mark.size
        lines: list[bytes] = []
        rest: bytes | None = None  # the end of a line that begins before; the last has none yet
        while end > 0 and len(lines) < most:
            start = max(0, end - _PIECE)
            piece = self.read(name, start, end - start)
            if rest is None:
                whole, newline, _ = piece.rpartition(b"\n")
                piece, rest = whole + newline, b""
            head, newline, whole = piece.partition(b"\n")
            if start == 0:
                lines = [*_lines_with(piece + rest, text), *lines]
            elif newline:
                lines = [*_lines_with(whole + rest, text), *lines]
                rest = head + newline
            else:
                rest = piece + rest if len(rest) < _PIECE else b""
            end = start
        return b"\n".join(lines[-most:])

    def close(self) -> None:
        """Stop reading."""


def _lines_with(block: bytes, text: bytes) -> list[bytes]:
    """Return the lines of whole lines that hold `text`, without splitting the others."""
    lines, position = [], block.find(text)
    while position >= 0:
        start, end = block.rfind(b"\n", 0, position) + 1, block.find(b"\n", position)
        lines.append(block[start : end if end >= 0 else len(block)])
        position = -1 if end < 0 else block.find(text, end)
    return lines
