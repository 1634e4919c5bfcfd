"""A prepared folder: token shards, the tokenizer, and a manifest of what it must contain.

    manifest.json           format, version, counts, tokenizer, the shards of each split
    tokenizer.json
    chat_template.jinja     and tokenizer_config.json, where the tokenizer has a chat template
    train-00000.npy ...     one-dimensional, uint16 or uint32, read through a memory map
    validation-00000.npy    absent where nothing is held out
    verified.json           shards that were verified, once the data have been read

The shards of a split are one long sequence of tokens, documents one after the other, each between
its beginning and its end token. Conversations have none around them: their tokens carry marks
(`packing.marked_values`). Nothing in it depends on a sequence length.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pydantic

from geojax.data.packing import Window, window_of_marked, window_of_tokens
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError
from geojax.json_file import load_json
from geojax.paths import write_atomically
from geojax.settings import Settings, validate

VERSION = 1
SplitName = Literal["train", "validation"]
TRAIN: Literal["train"] = "train"
VALIDATION: Literal["validation"] = "validation"
SPLITS: tuple[SplitName, ...] = (TRAIN, VALIDATION)

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

SHARD_TOKENS = 1 << 28
_MOST_REASON = 200
_MAPPED_SHARDS = 128
"""Most shards that are mapped at once, since each holds a file descriptor."""


class Shard(Settings):
    """One file of tokens."""

    # A plain name: a manifest cannot point out of its folder.
    file: str = pydantic.Field(pattern=r"^(train|validation)-[0-9]{5,}\.npy$")
    tokens: int = pydantic.Field(gt=0, lt=2**63)
    bytes: int = pydantic.Field(gt=0, lt=2**63)
    """Size of the file."""
    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the tokens, without the header of the file."""


def shard_file(split: str, number: int) -> str:
    """Return the name of a shard's file."""
    return f"{split}-{number:05}.npy"


class Split(Settings):
    """Shards of the training documents, or of the held-out ones."""

    documents: int = pydantic.Field(ge=0, lt=2**63)
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)


class TokenizerEntry(Settings):
    """Entry of the manifest for the tokenizer."""

    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    vocabulary_size: int = pydantic.Field(gt=0, le=2**24)
    beginning: str
    end: str


class Manifest(Settings):
    """The content of `manifest.json`."""

    format: Literal["geojax-tokens"] = "geojax-tokens"
    version: int = pydantic.Field(default=VERSION, ge=0, lt=2**31)
    dtype: Literal["uint16", "uint32"]
    text_bytes: int = pydantic.Field(ge=0, lt=2**63)
    """Size of the text in UTF-8, all splits together."""
    text_tokens: int | None = pydantic.Field(default=None, ge=0, lt=2**63)
    """Tokens that the text has become; null: all of them, or none where there is no text."""
    marked: bool = False
    """The shards hold `packing.marked_values`, not tokens."""
    tokenizer: TokenizerEntry
    splits: dict[SplitName, Split]

    @pydantic.model_validator(mode="after")
    def _shards_follow_one_another(self) -> "Manifest":
        for name, split in self.splits.items():
            for number, shard in enumerate(split.shards):
                if shard.file != (expected := shard_file(name, number)):
                    raise ValueError(
                        f"splits.{name}.shards.{number}.file is '{shard.file}', which would be "
                        f"'{expected}'"
                    )
        return self

    @property
    def tokens_of_text(self) -> int:
        """Number of tokens that the text has become."""
        if self.text_tokens is not None:
            return self.text_tokens
        return sum(split.tokens for split in self.splits.values()) if self.text_bytes else 0

    def to_json(self, indent: int | None = None) -> str:
        """Return the content of the file, without the keys of what is not in the folder."""
        absent = {"marked": self.marked, "text_tokens": self.text_tokens is not None}
        return self.model_dump_json(
            indent=indent, exclude={key for key, is_there in absent.items() if not is_there}
        )

    @pydantic.field_validator("version")
    @classmethod
    def _known_version(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"is {version} where this geojax reads {VERSION}; prepare it again")
        return version


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder, and nothing else of it.

    Raises:
        UserError: the folder is missing, not prepared, half prepared, or of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        if partial_path(folder).exists():
            why = "its preparation was interrupted or is still running"
        else:
            why = f"it has no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder}: not prepared data ({why}); run `geojax data prepare`")
    return validate(Manifest, load_json(path), str(path))


class TokenStream:
    """The tokens of one split as one sequence, mapped from its shards."""

    def __init__(
        self, folder: Path, split: Split, dtype: str, *, tokens: int | None = None, marks: int = 0
    ) -> None:
        """Check that each shard is there and complete.

        Args:
            folder: the folder of the shards.
            split: the shards.
            dtype: dtype of their values.
            tokens: number of tokens of the tokenizer, which values that are read are held to.
            marks: number of lowest bits of a value that are marks.

        Raises:
            UserError: a shard is missing, or shorter or longer than the manifest says.
        """
        for shard in split.shards:
            path = folder / shard.file
            if not path.is_file():
                raise UserError(f"{path}: is missing although {MANIFEST} lists it")
            size = path.stat().st_size
            if size != shard.bytes:
                raise UserError(
                    f"{path}: is {size:,} bytes long where {MANIFEST} says {shard.bytes:,}; "
                    "prepare the data again"
                )
        self._folder = folder
        self._shards = split.shards
        self._starts = np.cumsum([0, *(shard.tokens for shard in split.shards)])
        self._dtype = dtype
        self._tokens, self._marks = tokens, marks
        self._mapped = functools.lru_cache(maxsize=_MAPPED_SHARDS)(self._map)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return values `start` to `stop` as int32 [stop - start].

        Raises:
            UserError: a shard cannot be read, or a value is no token.
        """
        assert 0 <= start <= stop <= len(self), f"{start}:{stop} of {len(self)} tokens"
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        parts = []
        while start < stop:
            offset = int(self._starts[index])
            part = self._mapped(index)[start - offset : stop - offset]
            self._check_tokens(part, index, start - offset)
            parts.append(part)
            start, index = start + len(part), index + 1
        return np.concatenate(parts or [np.empty(0)]).astype(np.int32)

    def blocks(self, index: int, size: int) -> Iterator[np.ndarray]:
        """Yield the values of shard `index`, up to `size` at a time.

        Raises:
            UserError: as for `read`.
        """
        shard = self._mapped(index)
        for start in range(0, len(shard), size):
            block = np.ascontiguousarray(shard[start : start + size])
            self._check_tokens(block, index, start)
            yield block

    def _check_tokens(self, values: np.ndarray, index: int, start: int) -> None:
        """Raise a UserError if a value is no token; the first is at `start` of the shard."""
        if self._tokens is None or not len(values):
            return
        position = int(np.argmax(values))
        token = int(values[position]) >> self._marks
        if token >= self._tokens:
            raise UserError(
                f"{self._folder / self._shards[index].file}: holds token {token:,} at position "
                f"{start + position:,}, and the tokenizer has {self._tokens:,} tokens; the file is "
                "damaged: copy it again, or prepare the data again"
            )

    def _map(self, index: int) -> np.ndarray:
        shard = self._shards[index]
        path = self._folder / shard.file
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # a flipped bit of the header makes any error of a parser
            reason = " ".join(str(error)[:_MOST_REASON].split())
            raise UserError(f"{path}: not a shard of tokens ({reason})") from None
        if tokens.dtype != self._dtype or tokens.shape != (shard.tokens,):
            raise UserError(
                f"{path}: holds {tokens.dtype}{list(tokens.shape)} where {MANIFEST} says "
                f"{self._dtype}[{shard.tokens}]"
            )
        return tokens


def open_stream(folder: Path, manifest: Manifest, split: Split) -> TokenStream:
    """Open shards of a prepared folder as its manifest describes them.

    Raises:
        UserError: as for `TokenStream`.
    """
    return TokenStream(
        folder,
        split,
        manifest.dtype,
        tokens=manifest.tokenizer.vocabulary_size,
        marks=2 * manifest.marked,
    )


class TextDescription(NamedTuple):
    """A text as a person wants to know it."""

    place: Path
    """The folder or file that holds it."""
    documents: int
    """Number of documents to train on."""
    are_conversations: bool
    """True if the tokens carry marks of the loss, as those of conversations do."""
    bytes_per_token: float | None
    """Bytes of text per token; None: the text itself was never known."""


class StoredShard(NamedTuple):
    """A shard of an opened folder, to be compared with its checksum."""

    path: Path
    shard: Shard
    blocks: Callable[[int], Iterator[np.ndarray]]
    """Yields the values, up to so many at a time."""


class Prepared:
    """A prepared folder, opened for reading."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest and check the tokenizer and the shards against it.

        Raises:
            UserError: the folder is missing, not prepared, half prepared, damaged, or of another
                version.
        """
        self.folder = folder
        self.manifest = read_manifest(folder)
        entry = self.manifest.tokenizer
        self.tokenizer = Tokenizer.load(
            folder / TOKENIZER, beginning=entry.beginning, end=entry.end
        )
        if self.tokenizer.fingerprint != entry.sha256:
            raise UserError(f"{folder / TOKENIZER}: is not the one that {MANIFEST} was made with")
        if self.tokenizer.vocabulary_size != entry.vocabulary_size:
            raise UserError(
                f"{folder / MANIFEST}: tokenizer.vocabulary_size is {entry.vocabulary_size:,}, and "
                f"{TOKENIZER} has {self.tokenizer.vocabulary_size:,} tokens; prepare the data again"
            )
        self._streams = {
            name: open_stream(folder, self.manifest, split)
            for name, split in self.manifest.splits.items()
        }
        self.fingerprint: str = hashlib.sha256(self.manifest.to_json().encode()).hexdigest()
        """Hash that is equal for equal tokens and tokenizers, wherever they were prepared."""
        self.tokenizer_file: Path = folder / TOKENIZER

    def stream(self, split: SplitName) -> TokenStream:
        """Return the tokens of a split; the stream is empty if the folder has no such split."""
        if split in self._streams:
            return self._streams[split]
        return open_stream(self.folder, self.manifest, Split(documents=0, shards=()))

    @property
    def description(self) -> TextDescription:
        """The folder as a person wants to know it."""
        manifest, train = self.manifest, self.manifest.splits.get(TRAIN)
        has_text = bool(manifest.text_bytes and manifest.tokens_of_text)
        return TextDescription(
            self.folder,
            0 if train is None else train.documents,
            manifest.marked,
            manifest.text_bytes / manifest.tokens_of_text if has_text else None,
        )

    def token_count(self, split: SplitName) -> int:
        """Return the number of tokens of a split."""
        return len(self.stream(split))

    def window(self, split: SplitName, start: int, stop: int) -> Window:
        """Return tokens `start` to `stop` of a split."""
        values = self.stream(split).read(start, stop)
        if self.manifest.marked:
            return window_of_marked(values)
        return window_of_tokens(values, self.tokenizer)

    def shards(self) -> Iterator[StoredShard]:
        """Yield the shards of all splits."""
        for name, split in self.manifest.splits.items():
            for number, shard in enumerate(split.shards):
                blocks = functools.partial(self.stream(name).blocks, number)
                yield StoredShard(self.folder / shard.file, shard, blocks)

    def check_ends(self) -> None:
        """Check that each split begins with a document's beginning and ends with an end.

        Raises:
            UserError: it does not.
        """
        if self.manifest.marked:  # nothing stands around a conversation
            return
        words = self.tokenizer
        for name in self.manifest.splits:
            stream = self.stream(name)
            if not len(stream):
                continue
            (first,), (last,) = stream.read(0, 1), stream.read(len(stream) - 1, len(stream))
            if first != words.bos_id or (words.eos_id != words.bos_id and last != words.eos_id):
                raise UserError(
                    f"{self.folder}: {name} begins with token {first} and ends with token {last}, "
                    f"where a document begins with {words.bos_id} ('{words.beginning}') and ends "
                    f"with {words.eos_id} ('{words.end}'). Prepare the data again"
                )


class SplitWriter:
    """Appends documents' tokens to the shards of one split."""

    def __init__(
        self,
        folder: Path,
        name: SplitName,
        dtype: str,
        shard_tokens: int | None = None,
        shards: Sequence[Shard] = (),
        on_shard: Callable[[], None] = lambda: None,
    ) -> None:
        """Go on behind some shards.

        Args:
            folder: folder of the shards.
            name: name of the split.
            dtype: dtype of the values.
            shard_tokens: most tokens of a shard; None: `SHARD_TOKENS`.
            shards: shards that are whole.
            on_shard: called whenever one more is whole.
        """
        self._folder, self._name, self._dtype = folder, name, np.dtype(dtype)
        self._shard_tokens, self._on_shard = shard_tokens or SHARD_TOKENS, on_shard
        self.shards = list(shards)
        """Shards that are whole."""
        self._current: _ShardWriter | None = None

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._current:
            self._current.close()

    @property
    def tokens(self) -> int:
        """Number of tokens in the shards that are whole."""
        return sum(shard.tokens for shard in self.shards)

    def append(self, tokens: np.ndarray) -> None:
        """Append `tokens`, starting new shards as needed."""
        while len(tokens):
            if self._current is None:
                name = shard_file(self._name, len(self.shards))
                self._current = _ShardWriter(self._folder / name, self._dtype)
            room = self._shard_tokens - self._current.tokens
            self._current.append(tokens[:room])
            tokens = tokens[room:]
            if self._current.tokens == self._shard_tokens:
                self._finish_shard()

    def finish(self, documents: int) -> Split:
        """Close the last shard and return the manifest's entry for the split of `documents`."""
        if self._current:
            self._finish_shard()
        return Split(documents=documents, shards=tuple(self.shards))

    def _finish_shard(self) -> None:
        assert self._current is not None, "there is no shard to finish"
        self.shards.append(self._current.finish())
        self._current = None
        self._on_shard()


class _ShardWriter:
    """A .npy file that grows: numpy leaves room in the header for a longer shape."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._dtype = path, dtype
        self.tokens = 0
        self._digest = hashlib.sha256()
        self._file = path.open("wb")
        self._header_bytes = self._write_header()

    def append(self, tokens: np.ndarray) -> None:
        content = np.ascontiguousarray(tokens, self._dtype).data
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(tokens)

    def finish(self) -> Shard:
        self._file.seek(0)
        header_bytes = self._write_header()
        assert header_bytes == self._header_bytes, "the header outgrew its room"
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return Shard(
            file=self._path.name,
            tokens=self.tokens,
            bytes=self._path.stat().st_size,
            sha256=self._digest.hexdigest(),
        )

    def close(self) -> None:
        self._file.close()

    def _write_header(self) -> int:
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self.tokens,),
            },
        )
        return self._file.tell()


def token_dtype(vocabulary_size: int, *, marked: bool = False) -> Literal["uint16", "uint32"]:
    """Return the smallest type that holds every id, and two marks where they are marked."""
    return "uint16" if vocabulary_size << 2 * marked <= 1 << 16 else "uint32"


def write_manifest(
    folder: Path,
    tokenizer: Tokenizer,
    splits: Mapping[SplitName, Split],
    text_bytes: int,
    *,
    text_tokens: int,
    marked: bool,
) -> None:
    """Write `manifest.json`, the last of all files."""
    tokens = sum(split.tokens for split in splits.values())
    manifest = Manifest(
        dtype=token_dtype(tokenizer.vocabulary_size, marked=marked),
        text_bytes=text_bytes,
        text_tokens=text_tokens if 0 < text_tokens < tokens else None,
        marked=marked,
        tokenizer=TokenizerEntry(
            sha256=tokenizer.fingerprint,
            vocabulary_size=tokenizer.vocabulary_size,
            beginning=tokenizer.beginning,
            end=tokenizer.end,
        ),
        splits=dict(splits),
    )
    write_atomically(folder / MANIFEST, manifest.to_json(indent=1) + "\n")


def partial_path(folder: Path) -> Path:
    """Return the path at which `folder` is written until it is complete."""
    whole = Path(os.path.abspath(folder))
    return whole.with_name(f".{whole.name}.partial") if whole.name else whole / ".partial"
