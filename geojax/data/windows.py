"""Windows of a split, and batches of them in the order of its tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from geojax.data.packing import Batch, Window, pack, pad
from geojax.data.storage import SplitName
from geojax.data.tokenized_text import TokenizedText


class SequenceOrigin(NamedTuple):
    """The origin of a training sequence."""

    number: int
    """Number of the sequence in the run."""
    source: str
    """Name of its source."""
    start: int | None
    """Number of the source's training token that it begins with; None: it is made of documents
    that lie apart."""


class SequenceWindows:
    """Windows of sequence_length + 1 tokens, of which the last is the first of the next window."""

    def __init__(self, text: TokenizedText, split: SplitName, sequence_length: int) -> None:
        self._text, self._split = text, split
        self._tokens = text.token_count(split)
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        """Return the number of whole windows."""
        return max(self._tokens - 1, 0) // self.sequence_length

    @property
    def with_partial(self) -> int:
        """The number of windows in which every token but the first is a target once."""
        return -(-max(self._tokens - 1, 0) // self.sequence_length)

    def start(self, index: int) -> int:
        """Return the number of the split's token that window `index` begins with."""
        return int(index) * self.sequence_length

    def __getitem__(self, index: int) -> Window:
        """Read a window; the one behind the last whole one may be short, others are empty."""
        start = min(self.start(index), self._tokens)
        stop = min(start + self.sequence_length + 1, self._tokens)
        return self._text.window(self._split, start, stop)


def collate(windows: Sequence[Window], rows: np.ndarray) -> Batch:
    """Pack windows of equal length, which are the sequences `rows` of a global batch."""
    return {**pack(Window(*map(np.stack, zip(*windows, strict=True)))), "row": rows.copy()}


def batches_in_order(
    windows: SequenceWindows,
    *,
    global_batch_size: int,
    rows: np.ndarray | None = None,
    most_sequences: int | None = None,
) -> Iterator[Batch]:
    """Yield the batches of a split, in which every token but the first is a target once.

    The end of the last window, and the sequences that the last batch lacks, are padding (segment 0,
    no loss).

    Args:
        windows: those of at least two tokens.
        global_batch_size: sequences of a batch.
        rows: int32, those of each batch to yield; None: all.
        most_sequences: most windows to read, evenly spaced if there are more; None: all.
    """
    rows = np.arange(global_batch_size, dtype=np.int32) if rows is None else rows
    whole = windows.sequence_length + 1
    total = windows.with_partial
    count = total if most_sequences is None else min(total, most_sequences)
    chosen = np.arange(count) * total // count
    for first in range(0, count, global_batch_size):
        found = [windows[chosen[number] if number < count else total] for number in first + rows]
        lengths = np.asarray([max(len(window.tokens) - 1, 0) for window in found])
        filled = [
            Window(*(np.pad(each, (0, whole - len(each))) for each in window)) for window in found
        ]
        batch = collate(filled, rows)
        row = batch.pop("row")
        yield {**pad(batch, lengths), "row": row}
