"""The tokens of one part of a source, in files of their own from which an interrupted part goes on.

    part-00012-train, part-00012-validation     the values of the shards, as they are appended
    part-00012.json                             how many of them are certain, and what they count

Whatever is behind the certain values is cut off when the part goes on, and made again.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from geojax.data.files.opening import Advance
from geojax.data.preparation.file_tokens import Counts, FilePart, FileReader
from geojax.data.storage import SPLITS, SplitName
from geojax.paths import write_atomically

SAVED_TOKENS = 1 << 24
"""About the tokens of a part after which they are certain."""

_WRITTEN_VALUES = 1 << 20

Part = Sequence[FilePart]
"""Files, or a part of one, that a worker tokenizes in one go."""


@dataclasses.dataclass
class PartProgress:
    """The certain beginning of a part's tokens."""

    is_whole: bool = False
    """True if the part is done."""
    file: int = 0
    """Number of files of the part that are done."""
    pieces: int = 0
    """Number of pieces of the next file that are done."""
    bytes_read: int = 0
    """Bytes of files that were read for it."""
    values: dict[SplitName, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(SPLITS, 0)
    )
    """Values in the file of each split."""
    counts: Counts = dataclasses.field(default_factory=Counts)
    """Sums over them."""


def values_file(folder: Path, number: int, split: SplitName) -> Path:
    """Return the path of a part's values of one split."""
    return folder / f"part-{number:05}-{split}"


def progress_file(folder: Path, number: int) -> Path:
    """Return the path of a part's progress."""
    return folder / f"part-{number:05}.json"


def read_progress(folder: Path, number: int) -> PartProgress:
    """Read how far a part is; nothing is certain of one that was not begun."""
    try:
        content = json.loads(progress_file(folder, number).read_text())
    except FileNotFoundError:
        return PartProgress()
    return PartProgress(**content | {"counts": Counts(**content["counts"])})


def tokenize_part(
    folder: Path, number: int, part: Part, reader: FileReader, dtype: str, report: Advance
) -> PartProgress:
    """Write the tokens of a part, from where its progress says.

    Args:
        folder: folder that is being prepared.
        number: number of the part.
        part: the files.
        reader: reads their tokens.
        dtype: dtype of the shards.
        report: takes the bytes read.

    Raises:
        UserError: a file cannot be read, or holds something else.
    """
    progress = read_progress(folder, number)
    report(progress.bytes_read)
    if progress.is_whole:
        return progress
    with _PartWriter(folder, number, dtype, progress, report) as writer:
        for index in range(progress.file, len(part)):
            skip = progress.pieces
            writer.begin_file(skip)
            for tokens in reader.read(part[index], writer.advance, skip=skip):
                writer.append(tokens.split, tokens.stored)
                progress.counts.count(tokens)
                progress.pieces += 1
                if writer.unsaved >= SAVED_TOKENS:
                    writer.save()
            progress.file, progress.pieces = index + 1, 0
        progress.is_whole = True
        writer.save()
    return progress


class _PartWriter:
    """The files of a part that is being tokenized."""

    def __init__(
        self, folder: Path, number: int, dtype: str, progress: PartProgress, report: Advance
    ) -> None:
        self._folder, self._number, self._report = folder, number, report
        self._dtype, self._progress = np.dtype(dtype), progress
        self._files = {}
        for split in SPLITS:
            file = values_file(folder, number, split).open("ab")
            file.truncate(progress.values[split] * self._dtype.itemsize)
            self._files[split] = file
        self._waiting: dict[SplitName, list[np.ndarray]] = {split: [] for split in SPLITS}
        self._waiting_values = 0
        self.unsaved = 0
        """Tokens that are not certain."""
        self._read_again = 0

    def __enter__(self) -> "_PartWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def begin_file(self, skip: int) -> None:
        """Begin a file, of which the pieces to skip were reported before."""
        self._read_again = self._progress.bytes_read if skip else 0

    def advance(self, bytes_read: int) -> None:
        """Report the bytes that were read, but for those that are read again."""
        again = min(bytes_read, self._read_again)
        self._read_again -= again
        self._progress.bytes_read += bytes_read - again
        self._report(bytes_read - again)

    def append(self, split: SplitName, values: np.ndarray) -> None:
        """Append values to a split."""
        self._waiting[split].append(values)
        self._waiting_values += len(values)
        self.unsaved += len(values)
        if self._waiting_values >= _WRITTEN_VALUES:
            self._write()

    def save(self) -> None:
        """Make all that was appended certain."""
        self._write()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        content = json.dumps(dataclasses.asdict(self._progress))
        write_atomically(progress_file(self._folder, self._number), content)
        self.unsaved = 0

    def _write(self) -> None:
        for split, waiting in self._waiting.items():
            if waiting:
                values = np.concatenate(waiting, dtype=self._dtype, casting="unsafe")
                self._files[split].write(values.data)
                self._progress.values[split] += len(values)
                waiting.clear()
        self._waiting_values = 0


AppendParts = Callable[[int, PartProgress], None]
"""Takes the number of a part that is whole, in the order of the parts, and its progress."""
