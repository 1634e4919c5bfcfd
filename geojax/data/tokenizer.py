"""Tokenizers: byte-level BPE that is trained here, or any that people have in files."""

import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from geojax.data.tokenizer_files.reading import read_tokenizer
from geojax.errors import UserError

BEGINNING = "<|begin|>"
END = "<|end|>"
SMALLEST_VOCABULARY = 258
"""Smallest vocabulary: 256 bytes, the beginning and the end of a document."""
LARGEST_VOCABULARY = 1 << 20
"""Largest vocabulary that is trained; the trainer allocates for all of it before it reads text."""

LARGEST_ID = (1 << 24) - 1
"""Largest number of a token."""
RUN_CHARACTERS = 512
"""A tokenizer is trained on texts that are cut behind blocks of this many without a word break."""

_RUN = re.compile(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+")
_SHOWN = 40
_MOST_REASON = 200
_UNLIKELY_CHARACTER = "\U0010fffd"

# The names that well-known tokenizers give to a document's beginning and end, most specific first.
_KNOWN_PAIRS = (
    (BEGINNING, END),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
    ("[BOS]", "[EOS]"),
    ("<|endoftext|>", "<|endoftext|>"),
)


class Tokenizer:
    """Tokenizer with a token for the beginning and one for the end of a document.

    One token may serve as both (GPT-2's `<|endoftext|>`); then it stands once between documents.
    The object never changes, and neither does the `tokenizer.json` that it was read from, or that
    was made of other files: `content` is saved byte for byte, so that equal tokenizers have equal
    fingerprints.
    """

    def __init__(
        self, content: bytes, *, beginning: str | None = None, end: str | None = None, source: str
    ) -> None:
        """Read `content`, a `tokenizer.json`; `source` names it in messages.

        Raises:
            UserError: it is not such a file, or has no token of the name `beginning` or `end`; with
                neither given, the pair is looked for among those of well-known tokenizers.
        """
        self._source = source
        with _library_errors(f"{source}: not a tokenizer.json"):
            self._backend = tokenizers.Tokenizer.from_buffer(content)
        # A text that spells a special token is plain text: special tokens are placed here only.
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._content = content
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        largest = max(vocabulary, key=vocabulary.__getitem__, default=None)
        if largest is not None and vocabulary[largest] > LARGEST_ID:
            raise UserError(
                f"{source}: token '{largest[:_SHOWN]}' has the number {vocabulary[largest]:,}; at "
                f"most {LARGEST_ID:,} would be right"
            )
        if beginning is None and end is None:
            pairs = [pair for pair in _KNOWN_PAIRS if set(pair) <= vocabulary.keys()]
            if not pairs:
                raise UserError(
                    f"{source}: no token for the beginning and the end of a document is known; "
                    "a folder whose tokenizer_config.json names them would do, and geojax data "
                    "prepare takes beginning_token and end_token"
                )
            beginning, end = pairs[0]
        self.beginning = beginning if beginning is not None else str(end)
        self.end = end if end is not None else self.beginning
        if self.beginning != self.end and (self.end, self.beginning) in _KNOWN_PAIRS:
            raise UserError(
                f"{source}: a document would begin with '{self.beginning}' and end with "
                f"'{self.end}', which are swapped"
            )
        for token in (self.beginning, self.end):
            if token not in vocabulary:
                raise UserError(f"{source}: has no token '{token}'")
        self.bos_id: int = vocabulary[self.beginning]
        self.eos_id: int = vocabulary[self.end]
        self.vocabulary_size: int = max(vocabulary.values()) + 1
        """Number of rows that an embedding needs, which is the largest id plus one."""
        self.fingerprint: str = hashlib.sha256(content).hexdigest()
        self.encode(_UNLIKELY_CHARACTER)  # a vocabulary may lack the token for unknown ones

    @classmethod
    def load(
        cls, path: Path, *, beginning: str | None = None, end: str | None = None
    ) -> "Tokenizer":
        """Read the tokenizer in a file or a model's folder, of any kind in `tokenizer_files`.

        A folder's `bos_token` and `eos_token` are `beginning` and `end` where these are None, as
        are the tokens that a file of SentencePiece or tiktoken has for them.

        Raises:
            UserError: as for the constructor, or it cannot be read.
        """
        read = read_tokenizer(path)
        return cls(
            read.json,
            beginning=beginning or read.beginning,
            end=end or read.end,
            source=str(path),
        )

    @classmethod
    def train(cls, texts: Iterable[str], *, vocabulary_size: int) -> "Tokenizer":
        """Train a byte-level BPE (Sennrich et al. 2016; on bytes, Radford et al. 2019) on `texts`.

        Every text can be encoded: the 256 bytes are in the vocabulary. The vocabulary is smaller
        than requested if `texts` have too few distinct pairs to merge. Training cuts runs of
        letters, digits, blanks or other characters after at most 2 * RUN_CHARACTERS, and counts
        repetitions in a run once. The trainer's time is quadratic in the length of a word.
        """
        assert vocabulary_size >= SMALLEST_VOCABULARY, f"vocabulary_size is {vocabulary_size}"
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary_size,
            special_tokens=[BEGINNING, END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(itertools.chain.from_iterable(map(_cut_runs, texts)), trainer)
        content = backend.to_str(pretty=True).encode()
        return cls(content, beginning=BEGINNING, end=END, source="the trained tokenizer")

    def save(self, path: Path) -> None:
        """Write the `tokenizer.json`."""
        path.write_bytes(self._content)

    def encode(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`, without a document's beginning or end.

        With `special_tokens` it has those that the `tokenizer.json` itself gives to every text.
        """
        with self._encoding():
            return self._backend.encode(text, add_special_tokens=special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each of `texts`, computed by the library's own threads."""
        with self._encoding():
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_with_special_tokens(self, text: str) -> tokenizers.Encoding:
        """Encode a text in which special tokens are spelled, such as a rendered conversation."""
        with self._encoding():
            return self._reading_special_tokens.encode(text, add_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name; None: there is no such token."""
        number: int | None = self._backend.token_to_id(token)
        return number

    def name_of(self, token: int) -> str | None:
        """Return the name of a token by its id; None: there is no such token."""
        name: str | None = self._backend.id_to_token(token)
        return name

    def special_tokens_in(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the special tokens that `texts` spell."""
        for text in texts:
            yield from self._spelled.findall(text)

    def _encoding(self) -> contextlib.AbstractContextManager[None]:
        return _library_errors(f"{self._source}: this tokenizer cannot encode a text")

    @functools.cached_property
    def _reading_special_tokens(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_buffer(self._content)
        backend.no_truncation()
        backend.no_padding()
        return backend

    @functools.cached_property
    def _spelled(self) -> re.Pattern[str]:
        added = self._backend.get_added_tokens_decoder().values()
        names = [re.escape(token.content) for token in added if token.special]
        return re.compile("|".join([*names, re.escape(self.beginning), re.escape(self.end)]))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens have none."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def decode_behind(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to the text of `before`.

        Some tokenizers write a blank before a word, and none before a text's first word.
        """
        beginning, text = self.decode(before), self.decode([*before, *ids])
        return text[len(beginning) :] if text.startswith(beginning) else self.decode(ids)


@contextlib.contextmanager
def _library_errors(problem: str) -> Iterator[None]:
    """Say in one line what the library finds wrong; it raises bare exceptions, and panics.

    Raises:
        UserError: it found something.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{problem} ({str(error)[:_MOST_REASON]})") from None


def _cut_runs(text: str) -> Iterator[str]:
    """Cut a text behind each block of `RUN_CHARACTERS` that has no word break.

    Of equal blocks in a row the first one stands for all.
    """
    start, last = 0, ""
    for end in range(RUN_CHARACTERS, len(text), RUN_CHARACTERS):
        block = text[end - RUN_CHARACTERS : end]
        if start + RUN_CHARACTERS == end and block == last:
            start = end
        elif _RUN.fullmatch(block):
            yield text[start:end]
            start, last = end, block
    yield text[start:]
