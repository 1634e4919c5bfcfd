"""Batches by step: the global batch of step n is the same on any mesh and found in O(1).

Sample i of a source is the window of `sequence` + 1 tokens from token i * sequence on. Grain
shuffles each source's samples anew in every epoch, and deals rows to the sources in proportion to
their weights; both are functions of the row's number alone, so that the state is the step.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from geojax.data.corpus import Corpus
from geojax.data.packing import Batch, pack, pad
from geojax.data.storage import TRAIN, VALIDATION, TokenStream
from geojax.errors import UserError

_MOST_WINDOWS = 2**32
"""Most windows of a source, since Grain's shuffle permutes 32-bit numbers."""


class Loader:
    """Batches for the rows that this process needs of each global batch.

    A batch is a dict of arrays with one row for each of `rows`: what `pack` returns, and `row`
    (int32 [rows]), the index of each row in the global batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence: int,
        global_rows: int,
        rows: Sequence[int] | None = None,
        seed: int = 0,
        vocabulary_size: int | None = None,
        validation_rows: int = 256,
        threads: int = 2,
        prefetch: int = 8,
    ) -> None:
        """Open `corpus` for batches of `global_rows` rows of `sequence` tokens.

        Args:
            corpus: what to read.
            sequence: tokens of a row.
            global_rows: rows of a step's batch over all processes.
            rows: the indices (0 to global_rows - 1) that this process needs; all by default.
            seed: of the shuffling.
            vocabulary_size: of the model, to be checked against the tokenizer's.
            validation_rows: validation reads at most so many rows of each set.
            threads: that read ahead in `iterate`.
            prefetch: batches that they keep ready.

        Raises:
            UserError: the model's vocabulary is too small, or a source is shorter than a row.
        """
        rows = range(global_rows) if rows is None else rows
        assert len(rows), "a process needs at least one row"
        assert set(rows) <= set(range(global_rows)), (
            f"rows must lie in 0 to {global_rows - 1}: {list(rows)}"
        )
        needed = corpus.tokenizer.vocabulary_size
        if vocabulary_size is not None and vocabulary_size < needed:
            raise UserError(
                f"the model's vocabulary of {vocabulary_size} is smaller than the tokenizer's "
                f"{needed}; it must be at least that"
            )
        self.corpus = corpus
        self.sequence = sequence
        self.global_rows = global_rows
        self.seed = seed
        self.rows = np.asarray(rows, np.int32)
        self._validation_rows = validation_rows
        self._read_options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(prefetch, threads)
        )
        self._batches = grain.MapDataset.source(
            _Share(_blend(corpus, sequence, seed), global_rows, self.rows)
        ).batch(len(self.rows), drop_remainder=True, batch_fn=self._collate)
        self._held_out = {
            source.name: source.prepared.stream(VALIDATION)
            for source in corpus.sources
            if len(source.prepared.stream(VALIDATION)) > 1
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the data and of how it is read; equal if every step's global batch is equal."""
        identity = {
            "sequence": self.sequence,
            "global_rows": self.global_rows,
            "seed": self.seed,
            "sources": [
                [source.name, source.weight, source.prepared.fingerprint]
                for source in self.corpus.sources
            ],
        }
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def batch(self, step: int) -> Batch:
        """This process's rows of the batch at `step` (from 0)."""
        return self._batches[step]

    def iterate(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield the batches from `start_step` on, without end, read ahead by threads."""
        ahead = self._batches.slice(slice(start_step, None)).to_iter_dataset(self._read_options)
        # Closing the generator stops the threads.
        with contextlib.closing(iter(ahead)) as batches:
            yield from batches

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of the validation sets: the sources with held-out documents."""
        return tuple(self._held_out)

    def validation(self, name: str) -> Iterator[Batch]:
        """The batches of a validation set: the same rows in the same order every time.

        The rows are windows of the set, evenly spaced where there are more than `validation_rows`,
        whatever the size of the batch; the end of the set's last window and the rows that the last
        batch lacks are padding (segment 0, no loss).

        Raises:
            UserError: there is no such set.
        """
        if name not in self._held_out:
            known = ", ".join(self._held_out) or "none"
            raise UserError(f"no validation set is called '{name}'; there are: {known}")
        stream = self._held_out[name]
        # Every token but the first is a target once.
        windows = -(-(len(stream) - 1) // self.sequence)
        count = min(windows, self._validation_rows)
        chosen = np.arange(count) * windows // count
        for first in range(0, count, self.global_rows):
            numbers = first + self.rows
            found = [
                _window(stream, chosen[number] if number < count else windows, self.sequence)
                for number in numbers
            ]
            lengths = np.asarray([max(len(tokens) - 1, 0) for tokens in found])
            batch = self._collate([_filled(tokens, self.sequence) for tokens in found])
            row = batch.pop("row")
            yield {**pad(batch, lengths), "row": row}

    def _collate(self, windows: Sequence[np.ndarray]) -> Batch:
        tokenizer = self.corpus.tokenizer
        stacked = np.stack(windows)
        largest = int(stacked.max())
        if largest >= tokenizer.vocabulary_size:
            raise UserError(
                f"the data holds token {largest} where the tokenizer has "
                f"{tokenizer.vocabulary_size}; it is damaged, prepare it again"
            )
        return {**pack(stacked, tokenizer), "row": self.rows.copy()}


class _Windows:
    """Samples of a stream, of sequence + 1 tokens each."""

    def __init__(self, stream: TokenStream, sequence: int) -> None:
        self._stream, self._sequence = stream, sequence

    def __len__(self) -> int:
        return max(len(self._stream) - 1, 0) // self._sequence

    def __getitem__(self, index: int) -> np.ndarray:
        return _window(self._stream, index, self._sequence)


class _Share:
    """Of the blend's rows those that this process needs, step after step."""

    def __init__(self, blend: grain.MapDataset, global_rows: int, rows: np.ndarray) -> None:
        self._blend, self._global_rows, self._rows = blend, global_rows, rows.tolist()

    def __len__(self) -> int:
        return len(self._blend) // self._global_rows * len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray:
        step, place = divmod(index, len(self._rows))
        return self._blend[step * self._global_rows + self._rows[place]]


def _blend(corpus: Corpus, sequence: int, seed: int) -> grain.MapDataset:
    """All rows of training, without end: row r of step n is element n * global_rows + r."""
    sources = [source for source in corpus.sources if source.weight > 0]
    endless = []
    for source in sources:
        windows = _Windows(source.prepared.stream(TRAIN), sequence)
        if not len(windows):
            raise UserError(
                f"source '{source.name}' has {len(source.prepared.stream(TRAIN)):,} tokens to "
                f"train on, too few for one row of {sequence}; shorten the sequence or add text"
            )
        if len(windows) > _MOST_WINDOWS:
            raise UserError(
                f"source '{source.name}' has {len(windows):,} rows of {sequence}, more than the "
                f"{_MOST_WINDOWS:,} that can be shuffled; prepare it as several sources"
            )
        dataset = grain.MapDataset.source(windows).shuffle(seed=_source_seed(seed, source.name))
        endless.append(dataset.repeat())
    if len(endless) == 1:
        return endless[0]
    return grain.MapDataset.mix(endless, weights=[source.weight for source in sources])


def _source_seed(seed: int, name: str) -> int:
    """Derive a seed for one source; Grain adds the epoch to it, so that neighbors must differ."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "big")


def _window(stream: TokenStream, index: int, sequence: int) -> np.ndarray:
    start = min(int(index) * sequence, len(stream))
    return stream.read(start, min(start + sequence + 1, len(stream)))


def _filled(tokens: np.ndarray, sequence: int) -> np.ndarray:
    return np.pad(tokens, (0, sequence + 1 - len(tokens)))
