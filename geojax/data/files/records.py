"""Records of files, and their places, which messages name."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from geojax.data.files.opening import Advance, Span, silent


class NumberedPlace(NamedTuple):
    """The place of a record that no line number finds."""

    path: Path
    unit: str
    """Word for one record of the file: row, or record."""
    number: int
    """Its number, from 1 on."""

    def __str__(self) -> str:
        return f"{self.path}: {self.unit} {self.number}"


class Record(NamedTuple):
    """The values of a file's record by the names of its columns."""

    place: object
    """Its place: as text the file's path and the number of the line or record."""
    values: Mapping[str, Any]


class ColumnType(NamedTuple):
    """The type of a column's values, as far as it says what they are."""

    is_text: bool = False
    item_keys: frozenset[str] | None = None
    """The keys of the objects that its lists hold; None: its values are no lists of objects."""


class RecordFile(Protocol):
    """A format of files that hold records."""

    def columns(self, path: Path) -> dict[str, ColumnType] | None:
        """Return the columns of a file; None: it holds no record.

        Raises:
            UserError: it cannot be read.
        """

    def spans(self, path: Path, size: int) -> Iterator[Span | None]:
        """Divide a file into spans of about `size` bytes; None stands for all of it.

        Raises:
            UserError: it cannot be read.
        """

    def records(
        self,
        path: Path,
        names: Sequence[str],
        span: Span | None = None,
        advance: Advance = silent,
    ) -> Iterator[Record]:
        """Read the records of a file, or of a span of it.

        Args:
            path: the file.
            names: columns to read, where they can be read apart.
            span: one of `spans`; None: all of the file.
            advance: takes the bytes read.

        Raises:
            UserError: it cannot be read, or holds something else.
        """


def type_of_value(value: Any) -> ColumnType:
    """Return the type of a column of which `value` is an example."""
    if isinstance(value, str):
        return ColumnType(is_text=True)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return ColumnType(item_keys=frozenset(value[0]))
    return ColumnType()
