"""Order of the samples of one text as in Megatron-LM (core 0.16.1, `GPTDataset`).

Its documents are repeated for the epochs that a run needs and shuffled as one list. Sample i of S
tokens begins at token i * S of the documents in that order, and holds S + 1 tokens. The samples are
shuffled once more. If the run needs less than 80% of the last epoch, that epoch is shuffled apart.
"""

import numpy as np

from geojax.data.megatron.megatron_text import MegatronText
from geojax.data.packing import Window
from geojax.data.storage import TRAIN
from geojax.data.windows import SequenceOrigin
from geojax.errors import UserError

_LEAST_OF_FINAL_EPOCH = 0.80
_BLOCK = 64
"""Documents between two places of which the tokens before them are kept."""
_BLOCKS_AT_ONCE = 1 << 14


class SampleOrder:
    """Samples of one text, each of S + 1 tokens.

    Memory: 4 bytes for each document of each epoch, and 4 for each sample.
    """

    def __init__(
        self,
        name: str,
        text: MegatronText,
        *,
        sequence_length: int,
        samples: int | None,
        seed: int,
    ) -> None:
        """Shuffle as many epochs as `samples` need.

        Args:
            name: name of the source.
            text: the text, whose training documents are taken.
            sequence_length: S.
            samples: least number of samples; None: those of one epoch.
            seed: seed of both shuffles.

        Raises:
            UserError: the text has more sequences than Megatron-LM can number, or no tokens.
        """
        self.name = name
        self._text, self._sequence_length = text, sequence_length
        sequences = text.training_sequences
        if sequences.stop >= 2**31:
            raise UserError(
                f"{text.path}: order: megatron numbers at most {2**31 - 1:,} documents, and these "
                f"are {sequences.stop:,}; order: geojax takes any number"
            )
        tokens = text.token_count(TRAIN)
        if not tokens:
            raise UserError(f"{text.path}: has no tokens to train on; another split would do")
        epochs = 1 if samples is None else max(-(-(samples * sequence_length + 1) // tokens), 1)
        self._count = (epochs * tokens - 1) // sequence_length
        before_final = ((epochs - 1) * tokens - 1) // sequence_length
        is_final_apart = (
            samples is not None
            and epochs > 1
            and samples - before_final
            < int(_LEAST_OF_FINAL_EPOCH * ((tokens - 1) // sequence_length))
        )
        parts = (epochs - 1, 1) if is_final_apart else (epochs,)
        draws = np.random.RandomState(seed)
        self.documents = np.tile(np.arange(sequences.start, sequences.stop, dtype=np.int32), epochs)
        """int32: the documents of all epochs, one behind the other."""
        _shuffle_parts(self.documents, [part * len(sequences) for part in parts], draws)
        self.samples = np.arange(self._count, dtype=np.uint32 if self._count < 2**32 else np.int64)
        """Number of tokens before a sample, in units of S, by the sample's place in the order."""
        first = before_final if is_final_apart else self._count
        _shuffle_parts(self.samples, [first, self._count - first], draws)
        self._block_begins = _block_begins(text, self.documents)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._count

    def origin(self, number: int) -> SequenceOrigin:
        """Return the origin of a sequence."""
        return SequenceOrigin(number, self.name, None)

    def __getitem__(self, index: int) -> Window:
        """Read a sample.

        Raises:
            UserError: a value is no token.
        """
        start = int(self.samples[index]) * self._sequence_length
        stop = start + self._sequence_length + 1
        first, last = np.searchsorted(self._block_begins, (start, stop - 1), side="right") - 1
        documents = self.documents[first * _BLOCK : (last + 1) * _BLOCK]
        lengths = self._text.lengths_of(documents).astype(np.int64)
        ends = self._block_begins[first] + np.cumsum(lengths)
        begins = ends - lengths
        inside = (ends > start) & (begins < stop) & (lengths > 0)
        begins, ends = begins[inside], ends[inside]
        offsets = np.maximum(start - begins, 0)
        counts = np.minimum(ends, stop) - begins - offsets
        return self._text.window_of_pieces(documents[inside], offsets, counts)


def _shuffle_parts(values: np.ndarray, sizes: list[int], draws: np.random.RandomState) -> None:
    """Shuffle in place the parts of these sizes, one after the other."""
    start = 0
    for size in sizes:
        draws.shuffle(values[start : start + size])
        start += size


def _block_begins(text: MegatronText, documents: np.ndarray) -> np.ndarray:
    """Return the number of tokens (int64) before each block of documents."""
    sums = []
    step = _BLOCK * _BLOCKS_AT_ONCE
    for start in range(0, len(documents), step):
        tokens = text.lengths_of(documents[start : start + step])
        sums.append(np.add.reduceat(tokens, np.arange(0, len(tokens), _BLOCK), dtype=np.int64))
    totals = np.concatenate(sums)
    return np.cumsum(totals) - totals
