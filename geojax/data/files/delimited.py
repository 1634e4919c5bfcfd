"""Records of CSV and TSV files, whose first line names the columns."""

import csv
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from geojax.data.files.json_lines import LONGEST_LINE
from geojax.data.files.opening import Advance, Span, open_text, silent, suffix_of
from geojax.data.files.records import ColumnType, NumberedPlace, Record
from geojax.errors import UserError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}


class Delimited:
    """Files of values between commas or tabs, quoted as RFC 4180 has it."""

    def columns(self, path: Path) -> dict[str, ColumnType] | None:
        """Return the columns, whose values are all texts; None: there is no record."""
        for record in itertools.islice(self.records(path, ()), 1):
            return dict.fromkeys(record.values, ColumnType(is_text=True))
        return None

    def spans(self, path: Path, size: int) -> Iterator[Span | None]:
        """Read a file as a whole: a line's end may be inside of quotes."""
        yield None

    def records(
        self,
        path: Path,
        names: Sequence[str],
        span: Span | None = None,
        advance: Advance = silent,
    ) -> Iterator[Record]:
        """Read the records of a file; arguments are those of `RecordFile`."""
        assert span is None, "a file of CSV is read as a whole"
        csv.field_size_limit(LONGEST_LINE)
        # Quoted values keep their ends of lines.
        with open_text(path, advance, newline="") as text:
            rows = csv.reader(text, delimiter=_DELIMITERS.get(suffix_of(path), ","), strict=True)
            try:
                header = [name.removeprefix("\ufeff") for name in next(rows, [])]
                if len(set(header)) < len(header):
                    raise UserError(f"{path}:1: two columns have the same name")
                for number, row in enumerate(rows, start=1):
                    if not row:
                        continue
                    place = NumberedPlace(path, "row", number)
                    if len(row) != len(header):
                        raise UserError(
                            f"{place} (line {rows.line_num}): has {len(row)} values, and the first "
                            f"line names {len(header)} columns"
                        )
                    yield Record(place, dict(zip(header, row, strict=True)))
            except csv.Error as error:
                raise UserError(f"{path}:{rows.line_num}: not valid CSV ({error})") from None
