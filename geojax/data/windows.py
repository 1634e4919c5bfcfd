"""Windows of a token stream, and batches of them in the stream's order."""

from collections.abc import Iterator, Sequence

import numpy as np

from geojax.data.packing import Batch, pack, pad
from geojax.data.storage import TokenStream
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError


def window(stream: TokenStream, index: int, sequence_length: int) -> np.ndarray:
    """Read window `index`, whose last token is the first of the next one; the last may be short."""
    start = min(int(index) * sequence_length, len(stream))
    return stream.read(start, min(start + sequence_length + 1, len(stream)))


def collate(windows: Sequence[np.ndarray], rows: np.ndarray, tokenizer: Tokenizer) -> Batch:
    """Pack windows of equal length, which are the sequences `rows` of a global batch.

    Raises:
        UserError: a token is none of the tokenizer's.
    """
    stacked = np.stack(windows)
    largest = int(stacked.max())
    if largest >= tokenizer.vocabulary_size:
        raise UserError(
            f"the data holds token {largest} where the tokenizer has "
            f"{tokenizer.vocabulary_size}; it is damaged, prepare it again"
        )
    return {**pack(stacked, tokenizer), "row": rows.copy()}


def batches_in_order(
    stream: TokenStream,
    tokenizer: Tokenizer,
    *,
    sequence_length: int,
    global_batch_size: int,
    rows: np.ndarray | None = None,
    most_sequences: int | None = None,
) -> Iterator[Batch]:
    """Yield the batches of a stream, in which every token but the first is a target once.

    The end of the last window, and the sequences that the last batch lacks, are padding (segment 0,
    no loss).

    Args:
        stream: the tokens, at least two.
        tokenizer: the tokenizer that made them.
        sequence_length: tokens of a sequence.
        global_batch_size: sequences of a batch.
        rows: int32, those of each batch to yield; None: all.
        most_sequences: most windows to read, evenly spaced if there are more; None: all.
    """
    rows = np.arange(global_batch_size, dtype=np.int32) if rows is None else rows
    windows = -(-(len(stream) - 1) // sequence_length)
    count = windows if most_sequences is None else min(windows, most_sequences)
    chosen = np.arange(count) * windows // count
    for first in range(0, count, global_batch_size):
        found = [
            window(stream, chosen[number] if number < count else windows, sequence_length)
            for number in first + rows
        ]
        lengths = np.asarray([max(len(tokens) - 1, 0) for tokens in found])
        filled = [np.pad(tokens, (0, sequence_length + 1 - len(tokens))) for tokens in found]
        batch = collate(filled, rows, tokenizer)
        row = batch.pop("row")
        yield {**pad(batch, lengths), "row": row}
