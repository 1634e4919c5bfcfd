"""Records of JSON: an object a line, or one list of objects."""

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from geojax.data.files.opening import (
    Advance,
    Span,
    is_compressed,
    open_bytes,
    open_text,
    reading,
    silent,
)
from geojax.data.files.records import ColumnType, NumberedPlace, Record, type_of_value
from geojax.errors import UserError

LONGEST_LINE = 1 << 25
"""Most characters of a JSON line, or of an object in a list."""

_LONGEST_LINE_BYTES = 4 * LONGEST_LINE
_READ_CHARACTERS = 1 << 18
_DECODER = json.JSONDecoder()


class Line(NamedTuple):
    """A line of a file; as text it is the file's path and the line's number."""

    path: Path
    start: int
    """Byte of the file from which lines are counted."""
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number + _lines_before(self.path, self.start)}"


class JsonLines:
    """Files of an object a line, or of one list of objects."""

    def columns(self, path: Path) -> dict[str, ColumnType] | None:
        """Return the columns of the first object; None: there is none."""
        for record in itertools.islice(self.records(path, ()), 1):
            return {name: type_of_value(value) for name, value in record.values.items()}
        return None

    def spans(self, path: Path, size: int) -> Iterator[Span | None]:
        """Cut a plain file of lines into spans of about `size` bytes, each of whole lines."""
        if is_compressed(path) or path.stat().st_size <= size or _holds_list(path):
            yield None
            return
        yield from line_spans(path, size)

    def records(
        self,
        path: Path,
        names: Sequence[str],
        span: Span | None = None,
        advance: Advance = silent,
    ) -> Iterator[Record]:
        """Read the objects of a file, or of a span of it; arguments are those of `RecordFile`."""
        with open_text(path, advance, span) as text:
            if span is None:
                blanks, first = _first_line(text)
                if first.lstrip("\ufeff").lstrip().startswith("["):
                    yield from _objects_of_list(path, text, first)
                else:
                    yield from _objects_of_lines(path, text, 0, [first], skipped=blanks)
            else:
                yield from _objects_of_lines(path, text, span.start, [])


def line_spans(path: Path, size: int) -> Iterator[Span]:
    """Cut a plain file into spans of about `size` bytes, each of whole lines.

    Raises:
        UserError: it cannot be read.
    """
    with open_bytes(path) as file, reading(path):
        start, end = 0, file.seek(0, io.SEEK_END)
        while start < end:
            file.seek(min(start + size, end) - 1)
            rest = file.readline(_LONGEST_LINE_BYTES)
            # A line that is too long is an error of whoever reads it.
            stop = file.tell() if rest.endswith(b"\n") else end
            yield Span(start, stop)
            start = stop


def _lines_before(path: Path, start: int) -> int:
    """Count the lines of a file before the byte `start`, as they are counted when it is read."""
    if start == 0:
        return 0
    with open_text(path, silent, Span(0, start)) as lines:
        return sum(1 for _ in iter(lambda: lines.readline(LONGEST_LINE + 1), ""))


def _holds_list(path: Path) -> bool:
    with open_text(path, silent) as text:
        return _first_line(text)[1].lstrip("\ufeff").lstrip().startswith("[")


def _first_line(text: io.TextIOBase) -> tuple[int, str]:
    """Read the first line that is not blank, and count the blank ones before it."""
    for blanks in itertools.count():
        line = text.readline(LONGEST_LINE + 1)
        if not line or line.strip() or len(line) > LONGEST_LINE:
            return blanks, line
    raise AssertionError("a count never ends")


def _objects_of_lines(
    path: Path, text: io.TextIOBase, start: int, first: list[str], *, skipped: int = 0
) -> Iterator[Record]:
    following = iter(lambda: text.readline(LONGEST_LINE + 1), "")
    for number, content in enumerate(itertools.chain(first, following), start=skipped + 1):
        line = Line(path, start, number)
        if len(content) > LONGEST_LINE:
            raise UserError(f"{line}: a line of more than {LONGEST_LINE:,} characters")
        if not content.strip():
            continue
        try:
            values = json.loads(content)
        except ValueError as error:
            raise UserError(f"{line}: not valid JSON ({error})") from None
        except RecursionError:
            raise UserError(f"{line}: objects or lists too deep in each other") from None
        yield Record(line, _object(values, line))


def _objects_of_list(path: Path, text: io.TextIOBase, first: str) -> Iterator[Record]:
    """Decode the objects of a list one by one; only the one that is read is in memory."""
    buffer, position, is_whole = first, first.index("[") + 1, False

    def extend() -> None:
        nonlocal buffer, position, is_whole
        # What is too short is read again from its beginning: twice as much every time.
        wanted = max(_READ_CHARACTERS, len(buffer) - position)
        if wanted > LONGEST_LINE:
            raise UserError(f"{place}: an object of more than {LONGEST_LINE:,} characters")
        more = text.read(wanted)
        buffer, position, is_whole = buffer[position:] + more, 0, not more

    def skip_blanks() -> str:
        nonlocal position
        while True:
            while position < len(buffer) and buffer[position] in " \t\r\n":
                position += 1
            if position < len(buffer):
                return buffer[position]
            if is_whole:
                raise UserError(f"{place}: not valid JSON (the list has no end)")
            extend()

    for number in itertools.count(1):
        place = NumberedPlace(path, "record", number)
        following = skip_blanks()
        if number > 1 and following == ",":
            position += 1
            following = skip_blanks()
        elif number > 1 and following != "]":
            raise UserError(f"{place}: not valid JSON (no comma is before it)")
        if following == "]":
            return
        while True:
            try:
                values, position = _DECODER.raw_decode(buffer, position)
                break
            except ValueError as error:
                if is_whole:
                    reason = getattr(error, "msg", error)
                    raise UserError(f"{place}: not valid JSON ({reason})") from None
                extend()
            except RecursionError:
                raise UserError(f"{place}: objects or lists too deep in each other") from None
        yield Record(place, _object(values, place))


def _object(values: Any, place: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"{place}: expected an object, not {type(values).__name__}")
    return values
