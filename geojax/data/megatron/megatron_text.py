"""A text in Megatron-LM's files, whose tokens are read where they lie."""

import bisect
import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from geojax.data.megatron.document_split import ALL_TRAIN, document_ranges, parse_split
from geojax.data.megatron.indexed import SUFFIX, check_header, open_indexed
from geojax.data.packing import Window
from geojax.data.storage import TRAIN, VALIDATION, SplitName, StoredShard, TextDescription
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

_SUFFIXES = (SUFFIX, ".bin")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
"""Places of the file of tokens that the fingerprint covers, and the bytes of each."""
_BLOCK_BYTES = 1 << 24


def index_path(path: Path) -> Path:
    """Return the path of the index, of which `path` may be the prefix or the file of tokens."""
    prefix = path.with_suffix("") if path.suffix in _SUFFIXES else path
    return prefix.with_name(prefix.name + SUFFIX)


def check_files(path: Path) -> None:
    """Look for the files of `path` and read no more than the header of the index.

    Raises:
        UserError: one is missing, or is no such file.
    """
    check_header(index_path(path))


class MegatronText:
    """Documents that Megatron-LM has tokenized, memory-mapped.

    A split is a range of the index's sequences, as in Megatron-LM; most files hold one sequence a
    document. Documents begin where the index says, whatever tokens stand there.
    """

    def __init__(self, path: Path, tokenizer: Path, split: str | None = None) -> None:
        """Map the files and check the index.

        Args:
            path: prefix of the files, or one of them.
            tokenizer: the `tokenizer.json` that made the tokens.
            split: shares of training, validation and test documents; None: all train.

        Raises:
            UserError: a file is missing or damaged, or the two do not belong together.
        """
        self.path = index_path(path)
        self.tokenizer_file = tokenizer
        self.tokenizer = Tokenizer.load(tokenizer)
        self._index = open_indexed(self.path)
        ranges = document_ranges(parse_split(split or ALL_TRAIN), len(self._index.lengths))
        self._sequences: dict[SplitName, range] = dict(
            zip((TRAIN, VALIDATION), ranges, strict=True)
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the index, the size of the file of tokens and a sample of it, and the split."""
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        content = self._index.tokens.view(np.uint8)
        step = max(len(content) - _SAMPLE_BYTES, 0) / (_SAMPLES - 1)
        for sample in range(_SAMPLES):
            start = int(sample * step)
            digest.update(content[start : start + _SAMPLE_BYTES].tobytes())
        identity = [
            digest.hexdigest(),
            len(content),
            [[part.start, part.stop] for part in self._sequences.values()],
            self.tokenizer.fingerprint,
        ]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    @property
    def training_sequences(self) -> range:
        """Numbers of the index's sequences that are trained on."""
        return self._sequences[TRAIN]

    def lengths_of(self, sequences: np.ndarray) -> np.ndarray:
        """Return the numbers of tokens (int32) of the index's `sequences`."""
        return self._index.lengths_of(sequences)

    @property
    def description(self) -> TextDescription:
        """The files as a person wants to know them."""
        return TextDescription(self.path, len(self._sequences[TRAIN]), False, None)

    def token_count(self, split: SplitName) -> int:
        """Return the number of tokens of a split."""
        return len(self._tokens_of(split))

    def window(self, split: SplitName, start: int, stop: int) -> Window:
        """Return tokens `start` to `stop` of a split, in the order of the file.

        Raises:
            UserError: a value is no token.
        """
        tokens = self._tokens_of(split)[start:stop]
        bounds = range(len(self._index.documents) - 1)
        first, last = (
            bisect.bisect_left(bounds, end, key=self._first_token_of_document)
            for end in (tokens.start, tokens.stop)
        )
        begins = np.zeros(len(tokens), bool)
        if first < last:
            sequences = self._index.documents[first:last]
            begins[self._index.first_tokens(sequences) - tokens.start] = True
        return self._window(np.arange(tokens.start, tokens.stop), begins)

    def window_of_pieces(
        self, sequences: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
    ) -> Window:
        """Return pieces of sequences, one behind the other.

        Args:
            sequences: the sequence of each of P pieces, [P].
            offsets: int64 [P], the first token of each piece within its sequence; at 0 a document
                begins.
            lengths: int64 [P], tokens of each piece, at least 1.

        Raises:
            UserError: a value is no token.
        """
        ends = np.cumsum(lengths)
        firsts = self._index.first_tokens(sequences) + offsets
        positions = np.arange(ends[-1]) + np.repeat(firsts - (ends - lengths), lengths)
        begins = np.zeros(len(positions), bool)
        begins[(ends - lengths)[offsets == 0]] = True
        return self._window(positions, begins)

    def shards(self) -> Iterator[StoredShard]:
        """Yield nothing: the files have no checksums."""
        return iter(())

    def check_ends(self) -> None:
        """Check the first and the last token of each split.

        Raises:
            UserError: a value is no token.
        """
        for split in self._sequences:
            count = self.token_count(split)
            for start in {0, max(count - 1, 0)}:
                self.window(split, start, min(start + 1, count))

    def _tokens_of(self, split: SplitName) -> range:
        """Return the positions of a split's tokens in the file."""
        sequences = self._sequences[split]
        return range(
            *(self._first_token_of_sequence(end) for end in (sequences.start, sequences.stop))
        )

    def _first_token_of_document(self, document: int) -> int:
        return self._first_token_of_sequence(int(self._index.documents[document]))

    def _first_token_of_sequence(self, sequence: int) -> int:
        """Return the position of a sequence's first token; of the end, that behind the last."""
        if sequence == len(self._index.lengths):
            return len(self._index.tokens)
        return int(self._index.first_tokens(np.asarray(sequence)))

    def _window(self, positions: np.ndarray, begins: np.ndarray) -> Window:
        """Read the tokens at `positions`, of which `begins` [n] marks the first of a document."""
        tokens = self._index.tokens[positions]
        for position in (int(tokens.argmax()), int(tokens.argmin())) if len(tokens) else ():
            token = int(tokens[position])
            if not 0 <= token < self.tokenizer.vocabulary_size:
                raise UserError(
                    f"{self.path.with_suffix('.bin')}: holds token {token:,} at position "
                    f"{int(positions[position]):,}, and the tokenizer has "
                    f"{self.tokenizer.vocabulary_size:,} tokens; data.tokenizer with the "
                    "tokenizer.json that made these tokens would do"
                )
        return Window(tokens.astype(np.int32), begins, ~begins)
