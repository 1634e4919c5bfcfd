"""Batches by position: the n-th sequence of a run is the same on any mesh and found in O(1).

Sample i of a source is the window of S + 1 tokens from token i * S on, for sequences of S tokens.
Grain shuffles each source's samples anew in every epoch and takes sequences from the sources in
proportion to their weights. Both depend on the sequence's number alone, so that the state is the
number of sequences consumed, whatever the size of the batches. A corpus whose order is `megatron`
has the samples of Megatron-LM (`geojax.data.megatron.blend`), which depend on the run's length too.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from geojax.data.batch_ramp import BatchPhase, BatchRamp
from geojax.data.corpus import Corpus, Source
from geojax.data.megatron.blend import megatron_blend
from geojax.data.packing import Batch, Window
from geojax.data.storage import TRAIN, VALIDATION
from geojax.data.windows import SequenceOrigin, SequenceWindows, batches_in_order, collate
from geojax.errors import UserError

if TYPE_CHECKING:
    import grain

_MOST_WINDOWS = 2**32
"""Most windows of a source, since Grain's shuffle permutes 32-bit numbers."""


class Blend(Protocol):
    """Windows of a run's sequences by their numbers."""

    def __len__(self) -> int:
        """Return the number of sequences."""

    def __getitem__(self, index: int) -> Window:
        """Read a sequence."""

    def origin(self, number: int) -> SequenceOrigin:
        """Return the origin of a sequence."""


class _ReadAhead(NamedTuple):
    """A batch that is read before anybody asks for it, and those behind it."""

    consumed: int
    """Sequences of the run before the batch."""
    batch: Batch
    following: Generator[Batch]


class Loader:
    """Batches of the sequences that this process needs of each global batch.

    A batch is a dict of arrays with an entry for each of B sequences: those that `pack` returns,
    and `row` (int32 [B]), the index of each sequence in the global batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        sequence_length: int,
        global_batch_size: int,
        sequences: Sequence[int] | None = None,
        ramp: BatchRamp | None = None,
        seed: int = 0,
        vocab_size: int | None = None,
        validation_sequences: int = 256,
        total_sequences: int | None = None,
        threads: int = 2,
        prefetch: int = 8,
    ) -> None:
        """Open `corpus` for batches of `global_batch_size` sequences.

        Args:
            corpus: the sources to read.
            sequence_length: tokens of a sequence.
            global_batch_size: sequences of a step's batch over all processes.
            sequences: indices in the global batch that this process needs; None for all.
            ramp: smaller batches at the run's beginning, of which this process needs as large a
                share; None: there are none.
            seed: seed of the shuffling.
            vocab_size: the model's vocabulary, to be checked against the tokenizer's.
            validation_sequences: most sequences of each validation set to read.
            total_sequences: sequences that the whole run takes, on which Megatron-LM's order
                depends; None: unknown, for a corpus in geojax's order.
            threads: number of threads that read ahead in `iterate`.
            prefetch: number of batches that they keep ready.

        Raises:
            UserError: the model's vocabulary is too small, a source is shorter than a sequence, or
                Megatron-LM has no order of these sources.
        """
        sequences = range(global_batch_size) if sequences is None else sequences
        assert len(sequences), "a process must need at least one sequence"
        assert set(sequences) <= set(range(global_batch_size)), (
            f"sequences must lie in 0 to {global_batch_size - 1}: {list(sequences)}"
        )
        needed = corpus.tokenizer.vocabulary_size
        if vocab_size is not None and vocab_size < needed:
            raise UserError(
                f"the model's vocabulary of {vocab_size} is smaller than the tokenizer's "
                f"{needed}; it must be at least that"
            )
        self.corpus = corpus
        self.sequence_length = sequence_length
        self.global_batch_size = global_batch_size
        self.ramp = ramp or BatchRamp.constant(global_batch_size)
        assert self.ramp.full == global_batch_size, "a ramp must lead to the global batch"
        self.seed = seed
        self.sequences = np.asarray(sequences, np.int32)
        self._validation_sequences = validation_sequences
        # Imported here, so that a command that reads no data need not wait for it and for Orbax.
        import grain

        self._read_options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(prefetch, threads)
        )
        self._ahead: _ReadAhead | None = None
        self._total_sequences = total_sequences if corpus.order == "megatron" else None
        self._blend = self._open_blend()
        self._held_out = {
            source.name: SequenceWindows(source.text, VALIDATION, sequence_length)
            for source in corpus.sources
            if source.text.token_count(VALIDATION) > 1
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the data and of how it is read; equal if the n-th sequences are equal."""
        identity = {
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "sources": [
                [source.name, source.weight, source.text.fingerprint]
                for source in self.corpus.sources
            ],
        }
        if self.corpus.order == "megatron":
            given = [source.given_weight for source in self.corpus.sources]
            identity["megatron"] = [self._total_sequences, given]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def _open_blend(self) -> Blend:
        """Open the training sequences in the corpus's order."""
        sources = [source for source in self.corpus.sources if source.weight > 0]
        if self.corpus.order == "geojax":
            return _blend(sources, self.sequence_length, self.seed)
        assert self._total_sequences is not None, "Megatron-LM's order needs the run's length"
        return megatron_blend(
            sources,
            sequence_length=self.sequence_length,
            total_sequences=self._total_sequences,
            seed=self.seed,
        )

    def batch(self, step: int) -> Batch:
        """Return this process's sequences of the batch at `step` (from 0) of a run from scratch."""
        first = self.ramp.consumed_after(step)
        return self._batches(BatchPhase(self.ramp.size_at(first), first))[0]

    def origins(self, consumed: int) -> list[SequenceOrigin]:
        """Return the origin of each sequence of this process's batch behind `consumed` ones."""
        rows = self.ramp.share(self.ramp.size_at(consumed), self.sequences.tolist())
        return [self._blend.origin(consumed + row) for row in rows]

    def begins_document(self, number: int) -> bool:
        """Return whether a sequence of the run begins with a document's beginning."""
        return bool(self._blend[number].begins[0])

    def iterate(self, consumed: int = 0) -> Iterator[Batch]:
        """Yield the batches behind the first `consumed` sequences, endlessly, read by threads."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.consumed != consumed:
            ahead = self._first(consumed, ahead)
        with contextlib.closing(ahead.following) as following:
            yield ahead.batch
            yield from following

    def read_ahead(self, consumed: int) -> None:
        """Read the batch behind the first `consumed` sequences now, for an `iterate` from there.

        The threads that have read the batch before it read on.
        """
        self._ahead = self._first(consumed, self._ahead)

    def _first(self, consumed: int, before: _ReadAhead | None) -> _ReadAhead:
        """Read the batch behind the first `consumed` sequences, from where `before` has come."""
        if before is not None:
            if before.consumed + self.ramp.size_at(before.consumed) == consumed:
                return _ReadAhead(consumed, next(before.following), before.following)
            before.following.close()
        following = self._read(consumed)
        return _ReadAhead(consumed, next(following), following)

    def _read(self, consumed: int) -> Generator[Batch]:
        for phase in self.ramp.phases(consumed):
            ahead = self._batches(phase).to_iter_dataset(self._read_options)
            # Closing the generator stops the threads.
            with contextlib.closing(iter(ahead)) as batches:
                yield from batches

    def _batches(self, phase: BatchPhase) -> "grain.MapDataset":
        """Return this process's batches of a phase."""
        import grain

        sequences = np.asarray(self.ramp.share(phase.size, self.sequences.tolist()), np.int32)
        share = _Share(self._blend, phase, sequences)
        batch = {"drop_remainder": True, "batch_fn": functools.partial(collate, rows=sequences)}
        return grain.MapDataset.source(share).batch(len(sequences), **batch)

    @property
    def validation_names(self) -> tuple[str, ...]:
        """Names of the validation sets: the sources with held-out documents."""
        return tuple(self._held_out)

    def validation(self, name: str) -> Iterator[Batch]:
        """Return the batches of a validation set, the same in every call.

        The sequences are windows of the set, evenly spaced if there are more than
        `validation_sequences`, whatever the size of the batch.

        Raises:
            UserError: there is no such set.
        """
        if name not in self._held_out:
            known = ", ".join(self._held_out) or "none"
            raise UserError(f"no validation set is called '{name}'; there are: {known}")
        return batches_in_order(
            self._held_out[name],
            global_batch_size=self.global_batch_size,
            rows=self.sequences,
            most_sequences=self._validation_sequences,
        )


class _Share:
    """Sequences of the blend that this process needs in a phase, step after step."""

    def __init__(self, blend: Blend, phase: BatchPhase, sequences: np.ndarray) -> None:
        self._blend, self._phase = blend, phase
        self._sequences = sequences.tolist()

    def __len__(self) -> int:
        steps = (len(self._blend) - self._phase.first) // self._phase.size
        if self._phase.steps is not None:
            steps = min(steps, self._phase.steps)
        return steps * len(self._sequences)

    def __getitem__(self, index: int) -> Window:
        step, position = divmod(index, len(self._sequences))
        first = self._phase.first + step * self._phase.size
        return self._blend[first + self._sequences[position]]


class _ShuffledBlend:
    """Windows of all sources, each shuffled anew in every epoch."""

    def __init__(self, order: "grain.MapDataset", windows: Mapping[str, SequenceWindows]) -> None:
        """Take the windows of each source, and their order: a source and the number of a window."""
        self._order, self._windows = order, windows

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int) -> Window:
        source, window = self._order[index]
        return self._windows[source][window]

    def origin(self, number: int) -> SequenceOrigin:
        """Return the origin of a sequence."""
        source, window = self._order[number]
        return SequenceOrigin(number, source, self._windows[source].start(window))


def _blend(sources: Sequence[Source], sequence_length: int, seed: int) -> _ShuffledBlend:
    """Blend the sources without end; element n is the n-th sequence of a run."""
    import grain

    endless, windows_of = [], {}
    for source in sources:
        windows = SequenceWindows(source.text, TRAIN, sequence_length)
        if not len(windows):
            raise UserError(
                f"source '{source.name}' has {source.text.token_count(TRAIN):,} tokens to "
                f"train on, too few for a sequence of {sequence_length}; shorten the sequence or "
                "add text"
            )
        if len(windows) > _MOST_WINDOWS:
            raise UserError(
                f"source '{source.name}' has {len(windows):,} sequences of {sequence_length}, more "
                f"than the {_MOST_WINDOWS:,} that can be shuffled; prepare it as several sources"
            )
        windows_of[source.name] = windows
        numbers = grain.MapDataset.range(len(windows)).shuffle(seed=_source_seed(seed, source.name))
        endless.append(numbers.map(functools.partial(_place, source.name)).repeat())
    if len(endless) == 1:
        return _ShuffledBlend(endless[0], windows_of)
    weights = [source.weight for source in sources]
    return _ShuffledBlend(grain.MapDataset.mix(endless, weights=weights), windows_of)


def _place(source: str, window: int) -> tuple[str, int]:
    return source, window


def _source_seed(seed: int, name: str) -> int:
    """Derive a seed for one source; Grain adds the epoch to it, so that neighbors must differ."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "big")
