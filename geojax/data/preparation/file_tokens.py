"""The tokens of files, document by document: of text, conversations, or tokens already.

Text streams through: at any time a few megabytes of it are in memory, whatever the files' sizes.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from geojax.data.files.columns import Columns, Form, choose_columns, require
from geojax.data.files.conversations import conversation_of
from geojax.data.files.formats import holds_tokens, record_file_of
from geojax.data.files.opening import Advance, Span, silent
from geojax.data.files.records import Record
from geojax.data.files.text import DocumentPiece, read_text, split_text
from geojax.data.megatron.indexed import read_indexed
from geojax.data.packing import Window, marked_values
from geojax.data.settings import Format, PrepareSource
from geojax.data.storage import TRAIN, VALIDATION, SplitName
from geojax.data.templates.chat import ChatTemplate
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

_BATCH_CHARACTERS = 1 << 22
_FORMS: dict[Format, Form | Literal["chat"]] = {
    "chat": "chat",
    "openai": "openai",
    "sharegpt": "sharegpt",
    "alpaca": "alpaca",
}
"""Forms of records that formats give; others leave it to the columns."""


class Assigned(NamedTuple):
    """A piece of a document's text and the split that the document belongs to."""

    split: SplitName
    piece: DocumentPiece


class FileTokens(NamedTuple):
    """Tokens of a piece of a document, with those that begin and end it, and its split."""

    split: SplitName
    ids: np.ndarray
    first: bool
    text_bytes: int
    """Size of the text; 0 where only its tokens are known."""
    counts: np.ndarray | None = None
    """Tokens that the loss counts, bool [n]; None where the text is no conversation."""

    @property
    def stored(self) -> np.ndarray:
        """The values of the shard; those of a conversation, which is one piece, are marked."""
        if self.counts is None:
            return self.ids
        begins = np.arange(len(self.ids)) == 0
        return marked_values(Window(self.ids, begins, self.counts))


@dataclasses.dataclass
class Counts:
    """Sums over tokens."""

    documents: dict[SplitName, int] = dataclasses.field(
        default_factory=lambda: {TRAIN: 0, VALIDATION: 0}
    )
    text_bytes: int = 0
    """Bytes of text."""
    text_tokens: int = 0
    """Tokens that the text has become."""
    of_assistant: int = 0
    """Tokens of conversations that the loss counts."""

    def add(self, other: "Counts") -> None:
        """Add the sums over other tokens."""
        for split, documents in other.documents.items():
            self.documents[split] += documents
        self.text_bytes += other.text_bytes
        self.text_tokens += other.text_tokens
        self.of_assistant += other.of_assistant

    def count(self, tokens: FileTokens) -> None:
        """Add the tokens of a piece."""
        self.documents[tokens.split] += int(tokens.first)
        self.text_bytes += tokens.text_bytes
        self.text_tokens += len(tokens.ids) if tokens.text_bytes else 0
        self.of_assistant += 0 if tokens.counts is None else int(tokens.counts.sum())


Appends = Mapping[SplitName, Callable[[np.ndarray], None]]
"""Appends values to the shards of each split."""


def append_tokens(tokens: Iterable[FileTokens], appends: Appends) -> Counts:
    """Append all tokens to their splits, and count them."""
    counts = Counts()
    for piece in tokens:
        appends[piece.split](piece.stored)
        counts.count(piece)
    return counts


class FilePart(NamedTuple):
    """A file of a source, or a part of it."""

    path: Path
    span: Span | None
    """Part of the file; None: all of it."""
    split: SplitName | None
    """Split of all its documents; None: the source's share is held out."""


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Reads the tokens of a source's files."""

    source: PrepareSource
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """The template of conversations; None where there are none."""

    def read(self, part: FilePart, advance: Advance, *, skip: int = 0) -> Iterator[FileTokens]:
        """Read the tokens of a part of a file.

        Args:
            part: the part.
            advance: takes the bytes read.
            skip: number of pieces of its documents to leave out at its beginning.

        Raises:
            UserError: the file cannot be read, or holds something else.
        """
        path = part.path
        found: Iterator[FileTokens]
        if holds_tokens(path, self.source.format):
            found = itertools.islice(self._documents_of_tokens(path, advance), skip, None)
        elif self.template is not None:
            found = self._conversations(self.template, part, advance, skip)
        else:
            pieces = self._assigned(pieces_of(path, self.source, advance, part.span))
            found = tokenized(itertools.islice(pieces, skip, None), self.tokenizer)
        for tokens in found:
            yield tokens if part.split is None else tokens._replace(split=part.split)

    def _split_of(self, content: Callable[[], bytes]) -> SplitName:
        share = self.source.validation_fraction
        return VALIDATION if share and is_held_out(content(), share) else TRAIN

    def _assigned(self, pieces: Iterable[DocumentPiece]) -> Iterator[Assigned]:
        split: SplitName = TRAIN
        for piece in pieces:
            if piece.first:
                split = self._split_of(piece.text.encode)
            yield Assigned(split, piece)

    def _documents_of_tokens(self, path: Path, advance: Advance) -> Iterator[FileTokens]:
        split: SplitName = TRAIN
        for piece in read_indexed(path, self.tokenizer, advance):
            if piece.first:
                split = self._split_of(piece.ids.astype(np.int32).tobytes)
            ids = _framed(piece.ids, self.tokenizer, piece.first, piece.last)
            yield FileTokens(split, ids, piece.first, text_bytes=0)

    def _conversations(
        self, template: ChatTemplate, part: FilePart, advance: Advance, skip: int
    ) -> Iterator[FileTokens]:
        columns = columns_of(part.path, self.source)
        if columns is None:
            return
        records = _records(part.path, self.source, columns, advance, part.span)
        for record in itertools.islice(records, skip, None):
            messages, context = conversation_of(record, columns)
            try:
                conversation = template.conversation(messages, self.tokenizer, **context)
            except ValueError as error:
                raise UserError(f"{record.place}: {error}") from None
            ids = conversation.ids
            split = self._split_of(ids.astype(np.int32).tobytes)
            yield FileTokens(split, ids, bool(len(ids)), 0, conversation.of_assistant)


def tokenized(documents: Iterable[Assigned], tokenizer: Tokenizer) -> Iterator[FileTokens]:
    """Yield the tokens of pieces of text, in their order."""
    for batch in _batches(documents):
        ids_of_pieces = tokenizer.encode_batch([piece.text for _, piece in batch])
        for (split, piece), ids in zip(batch, ids_of_pieces, strict=True):
            framed = _framed(np.array(ids, np.int64), tokenizer, piece.first, piece.last)
            size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
            yield FileTokens(split, framed, piece.first, size)


def is_held_out(content: bytes, share: float) -> bool:
    """Return whether the document that begins with `content` is in the held-out `share`."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def content_of(path: Path, source: PrepareSource) -> Path:
    """Return the file that holds the documents which `path` names.

    Raises:
        UserError: it is missing.
    """
    content = path.with_suffix(".bin") if holds_tokens(path, source.format) else path
    if not content.is_file():
        raise UserError(f"{path}: its tokens, {content.name}, are not beside it")
    return content


def columns_of(path: Path, source: PrepareSource) -> Columns | None:
    """Return the columns that a source reads of a file; None: it holds no record.

    Raises:
        UserError: the file cannot be read, or which columns to read is unknown.
    """
    file = record_file_of(path, source.format)
    assert file is not None, "a text has no columns"
    types = file.columns(path)
    if types is None:
        return None
    return choose_columns(
        types, form=_FORMS.get(source.format, "auto"), name=source.text_field, where=path
    )


def pieces_of(
    path: Path, source: PrepareSource, advance: Advance = silent, span: Span | None = None
) -> Iterator[DocumentPiece]:
    """Read the text of a source's file.

    Raises:
        UserError: the file cannot be read, or a record has no text.
    """
    if record_file_of(path, source.format) is None:
        yield from read_text(path, advance)
        return
    columns = columns_of(path, source)
    if columns is None:
        return
    for record in _records(path, source, columns, advance, span):
        text = require(record, columns.names[0])
        if not isinstance(text, str):
            kind = "null" if text is None else type(text).__name__
            raise UserError(f"{record.place}: the field '{columns.names[0]}' is no text but {kind}")
        yield from split_text(text if text.isascii() else _without_halves(text))


def _records(
    path: Path, source: PrepareSource, columns: Columns, advance: Advance, span: Span | None
) -> Iterator[Record]:
    file = record_file_of(path, source.format)
    assert file is not None, "a text has no records"
    return file.records(path, (*columns.names, *columns.optional), span, advance)


def _without_halves(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON can spell: they are no characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _framed(ids: np.ndarray, tokenizer: Tokenizer, first: bool, last: bool) -> np.ndarray:
    """Put the tokens that begin and end a document around those of its first and last piece."""
    begin = [tokenizer.bos_id] if first else []
    end = [tokenizer.eos_id] if last and tokenizer.eos_id != tokenizer.bos_id else []
    return np.concatenate([np.array(begin, ids.dtype), ids, np.array(end, ids.dtype)])


def _batches(documents: Iterable[Assigned]) -> Iterator[list[Assigned]]:
    batch: list[Assigned] = []
    characters = 0
    for assigned in documents:
        batch.append(assigned)
        characters += len(assigned.piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
