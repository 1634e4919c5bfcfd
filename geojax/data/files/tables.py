"""Records of Parquet and Arrow files, read by pyarrow."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from geojax.data.files.opening import (
    INSTALL,
    Advance,
    Span,
    open_bytes,
    open_mapped,
    reading,
    silent,
)
from geojax.data.files.records import ColumnType, NumberedPlace, Record
from geojax.errors import UserError

_ROWS_AT_ONCE = 512
_ARROW_FILE = b"ARROW1"


class Parquet:
    """Parquet files; a span is some of their row groups."""

    def columns(self, path: Path) -> dict[str, ColumnType] | None:
        """Return the columns of the schema; None: there is no row."""
        with _reading(path) as arrow, _parquet_file(path) as file:
            return _columns(arrow, file.schema_arrow) if file.metadata.num_rows else None

    def spans(self, path: Path, size: int) -> Iterator[Span | None]:
        """Take row groups together that are about `size` bytes in the file."""
        with _reading(path), _parquet_file(path) as file:
            groups = range(file.num_row_groups)
            yield from _spans_of((_compressed_bytes(file, group) for group in groups), size)

    def records(
        self,
        path: Path,
        names: Sequence[str],
        span: Span | None = None,
        advance: Advance = silent,
    ) -> Iterator[Record]:
        """Read the rows of a file, or of its row groups; arguments are those of `RecordFile`."""
        with _reading(path), _parquet_file(path) as file:
            groups = range(file.num_row_groups) if span is None else range(*span)
            rows = sum(_row_count(file, number) for number in range(groups.start))
            wanted = [name for name in names if name in file.schema_arrow.names]
            for number in groups:
                size, count = _compressed_bytes(file, number), _row_count(file, number)
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[number], columns=wanted):
                    yield from _records_of_batch(path, batch, wanted, rows)
                    rows += len(batch)
                    advance(size * len(batch) // count)


class Arrow:
    """Arrow's files and streams, as `datasets` writes them; a span is some of their batches."""

    def columns(self, path: Path) -> dict[str, ColumnType] | None:
        """Return the columns of the schema; None: there is no row."""
        with _batches(path) as (arrow, schema, batches):
            return _columns(arrow, schema) if any(len(batch) for batch in batches) else None

    def spans(self, path: Path, size: int) -> Iterator[Span | None]:
        """Take batches together that are about `size` bytes in memory."""
        with _batches(path) as (_, _, batches):
            yield from _spans_of((batch.nbytes for batch in batches), size)

    def records(
        self,
        path: Path,
        names: Sequence[str],
        span: Span | None = None,
        advance: Advance = silent,
    ) -> Iterator[Record]:
        """Read the rows of a file, or of some of its batches; arguments as in `RecordFile`."""
        with _batches(path) as (_, schema, batches):
            wanted = [name for name in names if name in schema.names]
            rows = 0
            for number, batch in enumerate(batches):
                if span is None or number in range(*span):
                    for offset in range(0, len(batch), _ROWS_AT_ONCE):
                        part = batch.slice(offset, _ROWS_AT_ONCE)
                        yield from _records_of_batch(path, part, wanted, rows + offset)
                    advance(batch.nbytes)
                rows += len(batch)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Import pyarrow, and say in one line what it finds wrong with a file.

    Raises:
        UserError: pyarrow is missing, or the file cannot be read.
    """
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: Parquet and Arrow require pyarrow; {INSTALL}") from None
    with reading(path):
        yield pyarrow


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with open_bytes(path) as file, pyarrow.parquet.ParquetFile(file) as table:
        yield table


@contextlib.contextmanager
def _batches(path: Path) -> Iterator[tuple[Any, Any, Iterator[Any]]]:
    """Open a file of Arrow: the library, the schema, and its batches, which are not copied."""
    with _reading(path) as arrow, open_mapped(path) as mapped:
        if mapped.read(len(_ARROW_FILE)) == _ARROW_FILE:
            opened = arrow.ipc.open_file(mapped)
            numbers = range(opened.num_record_batches)
            yield arrow, opened.schema, map(opened.get_batch, numbers)
        else:
            mapped.seek(0)
            stream = arrow.ipc.open_stream(mapped)
            yield arrow, stream.schema, iter(stream)


def _spans_of(bytes_of_units: Iterable[int], size: int) -> Iterator[Span]:
    """Take units of a file together until they have `size` bytes."""
    begin, total, number = 0, 0, 0
    for number, unit_bytes in enumerate(bytes_of_units, start=1):
        total += unit_bytes
        if total >= size:
            yield Span(begin, number)
            begin, total = number, 0
    if begin < number:
        yield Span(begin, number)


def _compressed_bytes(file: Any, group: int) -> int:
    metadata = file.metadata.row_group(group)
    columns = range(metadata.num_columns)
    return sum(metadata.column(column).total_compressed_size for column in columns)


def _row_count(file: Any, group: int) -> int:
    count: int = file.metadata.row_group(group).num_rows
    return count


def _records_of_batch(
    path: Path, batch: Any, names: Sequence[str], rows_before: int
) -> Iterator[Record]:
    # A damaged file may have texts that begin or end outside of it.
    batch.select(names).validate(full=True)
    columns = [batch.column(name).to_pylist() for name in names]
    for number, values in enumerate(zip(*columns, strict=True), start=rows_before + 1):
        yield Record(NumberedPlace(path, "row", number), dict(zip(names, values, strict=True)))


def _columns(arrow: Any, schema: Any) -> dict[str, ColumnType]:
    return {field.name: _column_type(arrow, field.type) for field in schema}


def _column_type(arrow: Any, type: Any) -> ColumnType:
    types = arrow.types
    if types.is_dictionary(type):
        return _column_type(arrow, type.value_type)
    if types.is_string(type) or types.is_large_string(type) or types.is_string_view(type):
        return ColumnType(is_text=True)
    is_list = types.is_list(type) or types.is_large_list(type)
    if is_list and types.is_struct(type.value_type):
        return ColumnType(item_keys=frozenset(field.name for field in type.value_type))
    return ColumnType()
