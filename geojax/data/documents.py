"""Documents in files of text or JSON lines, plain or gzipped, read as a stream.

A document comes as one or more `Piece`s, so that a file larger than the memory can be one document.
"""

import glob
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeVar, cast

from geojax.data import indexed
from geojax.data.settings import Format
from geojax.errors import UserError
from geojax.paths import expanded_path

_Part = TypeVar("_Part")

PIECE_CHARACTERS = 1 << 18
"""Size of the pieces, cut at the end of a line, in which longer documents are tokenized."""

LONGEST_LINE = 1 << 25
"""Most characters of a JSON line."""
_LONGEST_LINE_BYTES = 4 * LONGEST_LINE

_MOST_NAMES = 6
_SHOWN = 40

# No text is compressed that well; what is may fill any disk and memory.
_MOST_EXPANSION = 200
_EXPANSION_FROM_BYTES = 1 << 26

_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class DocumentPiece:
    """A part of a document's text; `first` and `last` mark the document's ends."""

    text: str
    first: bool
    last: bool


class ByteSpan(NamedTuple):
    """Whole lines of a plain file, from one byte to another."""

    start: int
    stop: int


class Line(NamedTuple):
    """A line of a file; as text it is the file's path and the line's number."""

    path: Path
    start: int
    """Byte of the file from which lines are counted."""
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number + _lines_before(self.path, self.start)}"


def find_files(patterns: Iterable[str]) -> list[Path]:
    """Find the files that `patterns` (files, folders, globs with `**`) name, in order, each once.

    A folder stands for the .txt, .text, .md, .rst, .jsonl, .ndjson and .json files below it,
    gzipped or not, and for the .idx files of tokens. Hidden files are left out.

    Raises:
        UserError: a pattern names no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = expanded_path(pattern)
        if path.is_dir():
            files = [
                file
                for file in sorted(path.rglob("*"))
                if _suffix(file) in (*_TEXT_SUFFIXES, *_JSONL_SUFFIXES, indexed.SUFFIX)
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
                and file.is_file()
            ]
            wanted = "no text, JSON lines or .idx file in this folder"
        elif path.is_file():
            files, wanted = [path], ""
        else:
            matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
            files = [match for match in matches if match.is_file()]
            wanted = "no such file"
            if "://" in pattern:
                wanted = "is a URL; copy what it names to a disk of this machine"
        if not files:
            raise UserError(f"{pattern}: {wanted}")
        found.update(dict.fromkeys(files))
    return list(found)


def read_documents(
    path: Path,
    *,
    format: Format = "auto",
    field: str = "text",
    advance: Callable[[int], None] = lambda bytes_read: None,
    span: ByteSpan | None = None,
) -> Iterator[DocumentPiece]:
    """Read the documents of a file: all of a text file, or `field` of each JSON line.

    `advance` is called with the number of bytes read from the disk since its last call. Empty
    documents are left out. With a `span` of `line_spans` only its lines are read.

    Raises:
        UserError: the file's suffix tells no format, it cannot be read, is not UTF-8 text, or a
            line (its number is named) is no JSON object with a text in `field`.
    """
    format = format_of(path, format)
    assert format in ("text", "jsonl"), f"{format} has a reader of its own"

    def pieces(text: io.TextIOBase) -> Iterator[DocumentPiece]:
        return _json_lines(path, text, field, span) if format == "jsonl" else _text_document(text)

    yield from _streamed(path, pieces, advance, span)


def read_json_lines(
    path: Path,
    advance: Callable[[int], None] = lambda bytes_read: None,
    span: ByteSpan | None = None,
) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Read the objects of a file of JSON lines, or of a `span` of it, each with its line.

    Raises:
        UserError: as for `read_documents`.
    """
    yield from _streamed(path, lambda text: _json_objects(path, text, span), advance, span)


def line_spans(path: Path, size: int) -> Iterator[ByteSpan]:
    """Cut a plain file into spans of about `size` bytes, each of whole lines.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            start, end = 0, file.seek(0, io.SEEK_END)
            while start < end:
                file.seek(min(start + size, end) - 1)
                rest = file.readline(_LONGEST_LINE_BYTES)
                # A line that is too long is an error of whoever reads it.
                stop = file.tell() if rest.endswith(b"\n") else end
                yield ByteSpan(start, stop)
                start = stop
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _streamed(
    path: Path,
    parse: Callable[[io.TextIOBase], Iterator[_Part]],
    advance: Callable[[int], None],
    span: ByteSpan | None,
) -> Iterator[_Part]:
    try:
        with path.open("rb") as file:
            raw = file if span is None else _lines_of(file, span)
            decompressed = _unzipped(raw) if path.suffix == ".gz" else raw
            with io.TextIOWrapper(decompressed, encoding="utf-8") as text:
                position = raw.tell()
                for part in parse(text):
                    here = raw.tell()
                    advance(here - position)
                    position = here
                    yield part
                advance(raw.tell() - position)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def format_of(path: Path, format: Format) -> Literal["text", "jsonl", "megatron", "chat"]:
    """Return the format of a file, which is told by its suffix where `format` is auto.

    Raises:
        UserError: the suffix tells no format.
    """
    if format != "auto":
        return format
    suffix = _suffix(path)
    if suffix in _JSONL_SUFFIXES:
        return "jsonl"
    if suffix in (*_TEXT_SUFFIXES, ""):
        return "text"
    if suffix == indexed.SUFFIX:
        return "megatron"
    if suffix == ".bin" and path.with_suffix(indexed.SUFFIX).is_file():
        raise UserError(
            f"{path}: holds tokens; name {path.with_suffix(indexed.SUFFIX).name} beside it"
        )
    raise UserError(
        f"{path}: the suffix {suffix} is neither of text ({', '.join(_TEXT_SUFFIXES)}) nor of JSON "
        f"lines ({', '.join(_JSONL_SUFFIXES)}), plain or .gz, nor of Megatron-LM's tokens "
        f"({indexed.SUFFIX}). Convert the file, or take it for one document with --format text"
    )


def split_text(text: str) -> Iterator[DocumentPiece]:
    """Split a text in memory, which is one document, into pieces."""
    return _text_document(io.StringIO(text))


class _BytesOfSpan(io.RawIOBase):
    """The bytes of a file up to the end of a span; positions are those of the file."""

    def __init__(self, file: IO[bytes], span: ByteSpan) -> None:
        self._file, self._stop = file, span.stop
        file.seek(span.start)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        found = self._file.read(min(len(buffer), self._stop - self._file.tell()))
        buffer[: len(found)] = found
        return len(found)


def _lines_of(file: IO[bytes], span: ByteSpan) -> IO[bytes]:
    return cast(IO[bytes], io.BufferedReader(_BytesOfSpan(file, span), 1 << 20))


def _lines_before(path: Path, start: int) -> int:
    """Count the lines of a file before the byte `start`, as they are counted when it is read."""
    if start == 0:
        return 0
    with path.open("rb") as file:
        lines = io.TextIOWrapper(_lines_of(file, ByteSpan(0, start)), "utf-8", errors="replace")
        return sum(1 for _ in iter(lambda: lines.readline(LONGEST_LINE + 1), ""))


def _unzipped(raw: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], _GzipOfText(raw))


class _GzipOfText(gzip.GzipFile):
    """A gzipped file that ends with an error when it expands as no text does."""

    def __init__(self, compressed: IO[bytes]) -> None:
        super().__init__(fileobj=compressed)
        self._compressed = compressed
        self._expanded = 0

    def read1(self, size: int = -1) -> bytes:
        found = super().read1(size)
        self._expanded += len(found)
        allowed = max(_EXPANSION_FROM_BYTES, _MOST_EXPANSION * self._compressed.tell())
        if self._expanded > allowed:
            raise OSError(f"it expands to more than {_MOST_EXPANSION} times its size")
        return found


def _suffix(path: Path) -> str:
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix.lower()


def _text_document(text: io.TextIOBase) -> Iterator[DocumentPiece]:
    def take() -> str:
        part = text.read(PIECE_CHARACTERS)
        # A line without an end must not pull the rest of the file into memory.
        return part + text.readline(PIECE_CHARACTERS) if part else ""

    current, first = take(), True
    while current:
        following = take()
        yield DocumentPiece(current, first, last=not following)
        current, first = following, False


def _json_lines(
    path: Path, text: io.TextIOBase, field: str, span: ByteSpan | None
) -> Iterator[DocumentPiece]:
    for line, record in _json_objects(path, text, span):
        document = field_of(record, field, line)
        if not isinstance(document, str):
            kind = type(document).__name__
            hint = "; --format chat reads conversations" if isinstance(document, list) else ""
            raise UserError(f"{line}: the field '{field}' is no text but {kind}{hint}")
        # JSON can spell half of a surrogate pair, which is no character and has no UTF-8.
        document = document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield from split_text(document)


def field_of(record: dict[str, Any], field: str, line: Line) -> Any:
    """Return a field of a JSON line.

    Raises:
        UserError: there is none of that name.
    """
    if field not in record:
        names = sorted(record)
        known = ", ".join(name[:_SHOWN] for name in names[:_MOST_NAMES]) or "none"
        if len(names) > _MOST_NAMES:
            known += f" and {len(names) - _MOST_NAMES} more"
        hint = "; --format chat reads conversations" if "messages" in record else ""
        raise UserError(f"{line}: has no field '{field}'; its fields are: {known}{hint}")
    return record[field]


def _json_objects(
    path: Path, text: io.TextIOBase, span: ByteSpan | None
) -> Iterator[tuple[Line, dict[str, Any]]]:
    start = 0 if span is None else span.start
    contents = iter(lambda: text.readline(LONGEST_LINE + 1), "")
    for number, content in enumerate(contents, start=1):
        line = Line(path, start, number)
        if len(content) > LONGEST_LINE:
            raise UserError(f"{line}: a line of more than {LONGEST_LINE:,} characters")
        if not content.strip():
            continue
        try:
            record = json.loads(content)
        except ValueError as error:
            raise UserError(f"{line}: not valid JSON ({error})") from None
        except RecursionError:
            raise UserError(f"{line}: objects or lists too deep in each other") from None
        if not isinstance(record, dict):
            raise UserError(f"{line}: expected an object, not {type(record).__name__}")
        yield line, record
