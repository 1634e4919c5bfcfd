"""Sources, sequences and token texts of a run's data, as a person or a script wants to see them."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from geojax.data.corpus import Corpus
from geojax.data.loader import Loader
from geojax.data.packing import Batch
from geojax.data.storage import TRAIN, VALIDATION, TextDescription
from geojax.data.tokenizer import Tokenizer
from geojax.data.windows import SequenceWindows

_MOST_BATCH_TOKENS = 1 << 22
"""Most tokens of a batch that are read for its summary."""


class SourceFigures(NamedTuple):
    """Sizes of a source, and its share of a run."""

    name: str
    text: TextDescription
    tokens: int
    """Number of tokens to train on."""
    share: float
    """Share of the training sequences."""
    epochs: float | None
    """Number of times that the run reads the source; None: the run's steps are not known."""
    validation_tokens: int


class BatchFigures(NamedTuple):
    """Counts of a batch, or of its first sequences."""

    sequences: int
    sequence_length: int
    counted: int
    """Number of positions that the loss counts."""
    padding: int
    """Number of positions that are padding."""
    documents: int
    """Number of documents, or parts of documents, in all sequences."""


class DocumentSpan(NamedTuple):
    """Positions `start` to `stop` of a sequence, which are of one document."""

    segment: int
    """Number of the document in the sequence, from 1; 0: padding."""
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the document in the sequence."""
        return self.stop - self.start


class ShownSequence(NamedTuple):
    """A sequence of S tokens as the model gets it."""

    number: int
    """Number of the sequence in the run, or in the validation set."""
    source: str
    start: int | None
    """Number of the source's training token that the sequence begins with; None: unknown."""
    begins_document: bool | None
    """The first token begins a document; None: unknown."""
    arrays: dict[str, np.ndarray]
    """Arrays of `pack`, each [S]."""

    @property
    def documents(self) -> list[DocumentSpan]:
        """Documents of the sequence, and padding, in order."""
        segments = self.arrays["segment_ids"]
        changes = np.flatnonzero(np.diff(segments)) + 1
        bounds = [0, *changes.tolist(), len(segments)]
        return [
            DocumentSpan(int(segments[start]), start, stop)
            for start, stop in itertools.pairwise(bounds)
        ]

    @property
    def with_last_target(self) -> list[int]:
        """Tokens of the sequence, and the target of the last position: S + 1 in all."""
        return [*self.arrays["tokens"].tolist(), int(self.arrays["targets"][-1])]

    @property
    def is_counted(self) -> list[bool]:
        """True for each of `with_last_target` that the loss counts as a target."""
        return [False, *(self.arrays["loss_mask"] > 0).tolist()]

    def to_json(self, texts: "TokenTexts") -> dict[str, Any]:
        """Return all of it as values of JSON; `loss_mask` is about `targets`."""
        arrays = {name: values.tolist() for name, values in self.arrays.items()}
        tokens = arrays.pop("tokens")
        return {
            "number": self.number,
            "source": self.source,
            "start": self.start,
            "tokens": tokens,
            "texts": [texts.text(token) for token in tokens],
            **{name: list(map(int, values)) for name, values in arrays.items()},
        }


def source_figures(
    corpus: Corpus, sequence_length: int, sequences: int | None
) -> list[SourceFigures]:
    """Return the figures of each source.

    Args:
        corpus: the sources.
        sequence_length: tokens of a sequence.
        sequences: sequences of the whole run; None: they are not known.
    """
    figures = []
    for source in corpus.sources:
        windows = len(SequenceWindows(source.text, TRAIN, sequence_length))
        figures.append(
            SourceFigures(
                source.name,
                source.text.description,
                source.text.token_count(TRAIN),
                source.weight,
                sequences * source.weight / windows if sequences and windows else None,
                source.text.token_count(VALIDATION),
            )
        )
    return figures


def summarized_sequences(sequence_length: int, global_batch_size: int, shown: int) -> int:
    """Return how many sequences of a batch to read: all, unless that would take long."""
    return min(global_batch_size, max(shown, _MOST_BATCH_TOKENS // sequence_length, 1))


def batch_figures(batch: Batch) -> BatchFigures:
    """Count what is in a batch; sequences that are all padding do not exist."""
    segments = batch["segment_ids"]
    segments = segments[segments.any(axis=1)]
    return BatchFigures(
        len(segments),
        segments.shape[1],
        int(np.count_nonzero(batch["loss_mask"])),
        int(np.count_nonzero(segments == 0)),
        int(segments.max(axis=1, initial=0).sum()),
    )


def training_sequences(loader: Loader, step: int, batch: Batch, most: int) -> list[ShownSequence]:
    """Return the first `most` sequences of `batch`, which is the loader's at `step`."""
    sequences = []
    for row, origin in enumerate(loader.origins(loader.ramp.consumed_after(step))[:most]):
        begins = loader.begins_document(origin.number)
        sequences.append(
            ShownSequence(origin.number, origin.source, origin.start, begins, _row(batch, row))
        )
    return sequences


def validation_sequences(
    name: str, step: int, global_batch_size: int, batch: Batch, most: int
) -> list[ShownSequence]:
    """Return the first `most` sequences of `batch`, number `step` of the validation set `name`."""
    rows = np.flatnonzero(batch["segment_ids"].any(axis=1))[:most].tolist()
    first = step * global_batch_size
    return [ShownSequence(first + row, name, None, None, _row(batch, row)) for row in rows]


def _row(batch: Batch, row: int) -> dict[str, np.ndarray]:
    return {name: values[row] for name, values in batch.items() if name != "row"}


class TokenTexts:
    """Texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Take the tokenizer, and a token before which others are decoded."""
        self._tokenizer = tokenizer
        # A decoder may drop the space that a text begins with.
        self._before = tokenizer.encode("a")[-1:]
        self._text_before = tokenizer.decode(self._before)
        self.text = functools.cache(self._text)

    def is_special(self, token: int) -> bool:
        """Return True if the token stands for no text."""
        return not self._decoded(token)

    def _text(self, token: int) -> str:
        """Return a token's text; bytes that are only a part of a character are `<0xE2>`.

        A special token, which has no text, gets its name.
        """
        name = self._tokenizer.name_of(token)
        if name is None:
            return "<no token>"
        decoded = self._decoded(token)
        if not decoded:
            return name
        # The names of a byte-level vocabulary spell bytes. Others may only look like it.
        if all(character in _BYTES for character in name):
            content = bytes(_BYTES[character] for character in name)
            if content.decode("utf-8", "replace") == decoded:
                return "".join(_with_bytes_named(content))
        return name if "\N{REPLACEMENT CHARACTER}" in decoded else decoded

    def _decoded(self, token: int) -> str:
        whole = self._tokenizer.decode([*self._before, token])
        return whole.removeprefix(self._text_before)


def _with_bytes_named(content: bytes) -> Iterator[str]:
    """Yield the text of bytes in pieces, and the names of bytes that are no whole character."""
    while content:
        try:
            yield content.decode()
            return
        except UnicodeDecodeError as error:
            yield content[: error.start].decode()
            yield from (f"<0x{byte:02X}>" for byte in content[error.start : error.end])
            content = content[error.end :]


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in the names of a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the others, in order, for those from 256 on.
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in themselves]
    alphabet = {chr(byte): byte for byte in themselves}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_alphabet()
