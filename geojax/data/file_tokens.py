"""The tokens of files, document by document: of text, conversations, or tokens already.

Text streams through: at any time a few megabytes of it are in memory, whatever the files' sizes.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from geojax.data.chat import ChatTemplate
from geojax.data.documents import (
    ByteSpan,
    DocumentPiece,
    field_of,
    format_of,
    read_documents,
    read_json_lines,
)
from geojax.data.indexed import read_indexed
from geojax.data.packing import Window, marked_values
from geojax.data.settings import PrepareSource
from geojax.data.storage import TRAIN, VALIDATION, SplitName
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

_BATCH_CHARACTERS = 1 << 22


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


Appends = Mapping[SplitName, Callable[[np.ndarray], None]]
"""Appends values to the shards of each split."""


def append_tokens(tokens: Iterable[FileTokens], appends: Appends) -> Counts:
    """Append all tokens to their splits, and count them."""
    counts = Counts()
    for each in tokens:
        appends[each.split](each.stored)
        counts.documents[each.split] += each.first
        counts.text_bytes += each.text_bytes
        counts.text_tokens += len(each.ids) if each.text_bytes else 0
        counts.of_assistant += 0 if each.counts is None else int(each.counts.sum())
    return counts


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Reads the tokens of a source's files."""

    source: PrepareSource
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """The template of conversations; None where there are none."""

    def read(
        self,
        path: Path,
        advance: Callable[[int], None],
        span: ByteSpan | None = None,
        split: SplitName | None = None,
    ) -> Iterator[FileTokens]:
        """Read the tokens of a file.

        Args:
            path: the file.
            advance: told of the bytes that were read since its last call.
            span: part of the file to read; None: all.
            split: split of all documents; None: the source's share is held out.

        Raises:
            UserError: the file cannot be read, or holds something else.
        """
        if self.template is not None:
            found = self._conversations(self.template, path, advance, span)
        elif is_tokenized(path, self.source):
            found = self._documents_of_tokens(path, advance)
        else:
            found = tokenized(self._assigned(path, advance, span), self.tokenizer)
        for tokens in found:
            yield tokens if split is None else tokens._replace(split=split)

    def _split_of(self, content: bytes) -> SplitName:
        return VALIDATION if is_held_out(content, self.source.validation_fraction) else TRAIN

    def _assigned(
        self, path: Path, advance: Callable[[int], None], span: ByteSpan | None
    ) -> Iterator[Assigned]:
        split: SplitName = TRAIN
        for piece in pieces_of(path, self.source, advance, span):
            if piece.first:
                split = self._split_of(piece.text.encode())
            yield Assigned(split, piece)

    def _documents_of_tokens(
        self, path: Path, advance: Callable[[int], None]
    ) -> Iterator[FileTokens]:
        split: SplitName = TRAIN
        for piece in read_indexed(path, self.tokenizer, advance):
            if piece.first:
                split = self._split_of(piece.ids.astype(np.int32).tobytes())
            ids = _framed(piece.ids, self.tokenizer, piece.first, piece.last)
            yield FileTokens(split, ids, piece.first, text_bytes=0)

    def _conversations(
        self,
        template: ChatTemplate,
        path: Path,
        advance: Callable[[int], None],
        span: ByteSpan | None,
    ) -> Iterator[FileTokens]:
        for line, record in read_json_lines(path, advance, span):
            messages = field_of(record, self.source.field or "messages", line)
            if not isinstance(messages, list) or not all(
                isinstance(message, dict) for message in messages
            ):
                raise UserError(f"{line}: the messages are no list of objects")
            context = {"tools": record["tools"]} if "tools" in record else {}
            try:
                made = template.conversation(messages, self.tokenizer, **context)
            except ValueError as error:
                raise UserError(f"{line}: {error}") from None
            if len(made.ids):
                split = self._split_of(made.ids.astype(np.int32).tobytes())
                yield FileTokens(split, made.ids, True, 0, made.of_assistant)


def tokenized(documents: Iterable[Assigned], tokenizer: Tokenizer) -> Iterator[FileTokens]:
    """Yield the tokens of pieces of text, in their order."""
    for batch in _batches(documents):
        ids_of_pieces = tokenizer.encode_batch([piece.text for _, piece in batch])
        for (split, piece), ids in zip(batch, ids_of_pieces, strict=True):
            framed = _framed(np.asarray(ids, np.int64), tokenizer, piece.first, piece.last)
            yield FileTokens(split, framed, piece.first, len(piece.text.encode()))


def is_held_out(content: bytes, share: float) -> bool:
    """Return whether the document that begins with `content` is in the held-out `share`."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def is_tokenized(path: Path, source: PrepareSource) -> bool:
    """Return True for an index of tokens, beside which they lie."""
    return format_of(path, source.format) == "megatron"


def content_of(path: Path, source: PrepareSource) -> Path:
    """Return the file that holds the documents which `path` names.

    Raises:
        UserError: it is missing.
    """
    content = path.with_suffix(".bin") if is_tokenized(path, source) else path
    if not content.is_file():
        raise UserError(f"{path}: its tokens, {content.name}, are not beside it")
    return content


def pieces_of(
    path: Path,
    source: PrepareSource,
    advance: Callable[[int], None],
    span: ByteSpan | None = None,
) -> Iterator[DocumentPiece]:
    """Read the text of a source's file."""
    field = source.field or "text"
    return read_documents(path, format=source.format, field=field, advance=advance, span=span)


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
