"""The one place where files of documents are opened, plain or compressed."""

import contextlib
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from geojax.errors import RunError, UserError, is_disk_full

COMPRESSED_SUFFIXES = (".gz", ".zst")

# No text is compressed that well; what is may fill any disk and memory.
_MOST_EXPANSION = 200
_EXPANSION_FROM_BYTES = 1 << 26
_BUFFER_BYTES = 1 << 20
_MOST_REASON = 200

INSTALL = "pip install 'geojax-trainer[data]'"
"""The command that installs the libraries of the formats that need one."""

Advance = Callable[[int], None]
"""Takes the number of bytes that were read from the disk since its last call."""


def silent(bytes_read: int) -> None:
    """Show no progress."""


class Span(NamedTuple):
    """Consecutive units of a file, from one to before another: bytes, row groups or records."""

    start: int
    stop: int


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's content, without that of its compression."""
    plain = path.with_suffix("") if path.suffix.lower() in COMPRESSED_SUFFIXES else path
    return plain.suffix.lower()


def is_compressed(path: Path) -> bool:
    """Return whether a file's suffix is one of a compressed file."""
    return path.suffix.lower() in COMPRESSED_SUFFIXES


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file of documents for reading; every reader of documents comes through here.

    Raises:
        UserError: it cannot be read.
    """
    with reading(path):
        return path.open("rb")


def open_mapped(path: Path) -> Any:
    """Map a file into memory, for pyarrow."""
    import pyarrow

    return pyarrow.memory_map(str(path))


@contextlib.contextmanager
def open_text(
    path: Path, advance: Advance, span: Span | None = None, *, newline: str | None = None
) -> Iterator[io.TextIOBase]:
    """Open a file of text, or a span of its bytes; decompress it, and count the bytes read.

    Ends of lines become LF, unless `newline` is "".

    Raises:
        UserError: it cannot be read, or is not UTF-8 text.
    """
    with open_bytes(path) as file, reading(path):
        counted = cast(IO[bytes], io.BufferedReader(_Counted(file, span, advance), _BUFFER_BYTES))
        with io.TextIOWrapper(
            _decompressed(path, counted), encoding="utf-8", newline=newline
        ) as text:
            yield text


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in one line what is wrong with a file that is being read.

    Raises:
        UserError: it cannot be read, or is not UTF-8 text.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x})") from None
    except (UserError, RunError):
        raise
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if is_disk_full(error):
            raise
        reason = " ".join(str(error).split())[:_MOST_REASON]
        raise UserError(f"{path}: cannot be read ({reason})") from None


class _Counted(io.RawIOBase):
    """The bytes of a file, or of a span of it, which tells how many were read."""

    def __init__(self, file: IO[bytes], span: Span | None, advance: Advance) -> None:
        self._file, self._advance = file, advance
        self._left = os.fstat(file.fileno()).st_size if span is None else span.stop - span.start
        self._endless = span is None
        if span is not None:
            file.seek(span.start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        wanted = len(buffer) if self._endless else min(len(buffer), self._left)
        content = self._file.read(wanted)
        self._left -= len(content)
        buffer[: len(content)] = content
        self._advance(len(content))
        return len(content)


def _decompressed(path: Path, raw: IO[bytes]) -> IO[bytes]:
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], _Guarded(gzip.GzipFile(fileobj=raw), path))
        case ".zst":
            return cast(IO[bytes], _Guarded(_zstd(path, raw), path))
    return raw


def _zstd(path: Path, raw: IO[bytes]) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: zstd requires pyarrow; {INSTALL}") from None
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


class _Guarded(io.RawIOBase):
    """Decompressed bytes, which end with an error when they expand as no text does."""

    def __init__(self, decompressed: Any, path: Path) -> None:
        self._decompressed = decompressed
        self._allowed = max(_EXPANSION_FROM_BYTES, _MOST_EXPANSION * path.stat().st_size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._decompressed.read(len(buffer))
        self._allowed -= len(content)
        if self._allowed < 0:
            raise OSError(f"it expands to more than {_MOST_EXPANSION} times its size")
        buffer[: len(content)] = content
        return len(content)
