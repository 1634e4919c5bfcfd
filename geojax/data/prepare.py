"""Preparation of text: train or read a tokenizer, tokenize, and write shards into folders.

Text streams through: at any time a few megabytes of it are in memory, whatever the files' sizes.
Documents that are tokenized already stream past the tokenizer into the same shards.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from geojax.data.atomic_folder import atomic_folder, is_taken
from geojax.data.chat import ChatTemplate
from geojax.data.documents import (
    Piece,
    field_of,
    find_files,
    format_of,
    read_documents,
    read_json_lines,
)
from geojax.data.indexed import read_indexed
from geojax.data.packing import Window, marked_values
from geojax.data.settings import PrepareSettings, PrepareSource
from geojax.data.storage import (
    TRAIN,
    VALIDATION,
    Prepared,
    SplitName,
    SplitWriter,
    token_dtype,
    write_manifest,
)
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

_BATCH_CHARACTERS = 1 << 22


class Assigned(NamedTuple):
    """A piece of a document's text and the split that the document belongs to."""

    split: SplitName
    piece: Piece


class Tokens(NamedTuple):
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


def prepare(settings: PrepareSettings, *, progress: bool = False) -> list[Prepared]:
    """Prepare each source in a folder of its name below `settings.output`.

    Raises:
        UserError: an output exists, files are missing or unreadable, there is no text in them, or
            the share to hold out holds out no document.
    """
    for source in settings.sources:
        folder = settings.output / source.name
        if is_taken(folder):
            raise UserError(f"{folder}: exists already; remove it or choose another output")
    files = {
        source.name: (find_files(source.files), find_files(source.validation_files))
        for source in settings.sources
    }
    if settings.tokenizer is None:
        _require_tokenizer(settings, files)
    with progress_bar(enabled=progress) as bar:
        if settings.tokenizer is not None:
            tokenizer = Tokenizer.load(
                settings.tokenizer, beginning=settings.beginning_token, end=settings.end_token
            )
        else:
            texts = _training_texts(settings, files, bar)
            tokenizer = Tokenizer.train(texts, vocabulary_size=settings.vocab_size)
        prepared = []
        for source in settings.sources:
            folder = settings.output / source.name
            with atomic_folder(folder, wait=False) as partial:
                assert partial is not None, "without waiting there is a folder or an error"
                reader = _reader(source, settings, tokenizer)
                tokens = _tokens(source, *files[source.name], reader, bar)
                _write(partial, tokens, tokenizer, source)
            prepared.append(Prepared(folder))
    return prepared


def _require_tokenizer(
    settings: PrepareSettings, files: dict[str, tuple[list[Path], list[Path]]]
) -> None:
    for source in settings.sources:
        for path in itertools.chain(*files[source.name]):
            if _is_tokenized(path, source):
                raise UserError(
                    f"{path}: holds tokens, not text; name the tokenizer.json that made them "
                    "(--tokenizer)"
                )
            if source.format == "chat":
                raise UserError(
                    f"{path}: conversations are read with a model's tokenizer.json and its chat "
                    "template; name it (--tokenizer)"
                )


def write_prepared(
    folder: Path, tokens: Iterable[Tokens], tokenizer: Tokenizer, *, marked: bool = False
) -> None:
    """Fill `folder` with the shards of `tokens`, the tokenizer and the manifest.

    All tokens are those of conversations where they are `marked`, and none where they are not.
    """
    dtype = token_dtype(tokenizer.vocabulary_size, marked=marked)
    text_bytes = 0
    with (
        SplitWriter(folder, TRAIN, dtype) as train,
        SplitWriter(folder, VALIDATION, dtype) as validation,
    ):
        writers: dict[SplitName, SplitWriter] = {TRAIN: train, VALIDATION: validation}
        for each in tokens:
            writers[each.split].documents += each.first
            assert (each.counts is not None) == marked, "a folder is marked or it is not"
            writers[each.split].append(each.stored)
            text_bytes += each.text_bytes
        splits = {name: writer.finish() for name, writer in writers.items()}
    write_manifest(folder, tokenizer, splits, text_bytes, marked=marked)


def tokenized(documents: Iterable[Assigned], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yield the tokens of pieces of text, in their order."""
    for batch in _batches(documents):
        ids_of_pieces = tokenizer.encode_batch([piece.text for _, piece in batch])
        for (split, piece), ids in zip(batch, ids_of_pieces, strict=True):
            framed = _framed(np.asarray(ids, np.int64), tokenizer, piece.first, piece.last)
            yield Tokens(split, framed, piece.first, len(piece.text.encode()))


def _framed(ids: np.ndarray, tokenizer: Tokenizer, first: bool, last: bool) -> np.ndarray:
    """Put the tokens that begin and end a document around those of its first and last piece."""
    begin = [tokenizer.bos_id] if first else []
    end = [tokenizer.eos_id] if last and tokenizer.eos_id != tokenizer.bos_id else []
    return np.concatenate([np.array(begin, ids.dtype), ids, np.array(end, ids.dtype)])


def is_held_out(content: bytes, share: float) -> bool:
    """Return whether the document that begins with `content` is in the held-out `share`."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def progress_bar(*, enabled: bool) -> Progress:
    """Make a progress bar in bytes, on the terminal that the standard error stream is."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not enabled or not console.is_terminal,
    )


def _write(
    folder: Path, tokens: Iterable[Tokens], tokenizer: Tokenizer, source: PrepareSource
) -> None:
    counts = {TRAIN: 0, VALIDATION: 0}
    marked, of_assistant = source.format == "chat", 0

    def counted() -> Iterator[Tokens]:
        nonlocal of_assistant
        for each in tokens:
            counts[each.split] += each.first
            of_assistant += 0 if each.counts is None else int(each.counts.sum())
            yield each

    write_prepared(folder, counted(), tokenizer, marked=marked)
    total = sum(counts.values())
    if source.files and total == counts[VALIDATION] == 0:
        raise UserError(f"source '{source.name}': the files hold no text")
    if marked and not of_assistant:
        raise UserError(
            f"source '{source.name}': no token of an assistant is in its {total} conversations, so "
            "that nothing would be learned"
        )
    if source.files and not counts[TRAIN]:
        raise UserError(
            f"source '{source.name}': no document is left to train on of {total}; "
            f"validation_fraction {source.validation_fraction:g} is too much, or the files hold no "
            "text"
        )
    if (source.validation_fraction or source.validation_files) and not counts[VALIDATION]:
        raise UserError(
            f"source '{source.name}': the validation set is empty: validation_fraction "
            f"{source.validation_fraction:g} of {total} documents is none; hold out more, or name "
            "validation_files"
            if source.validation_fraction
            else f"source '{source.name}': the validation_files hold no text"
        )


_Reader = Callable[[Path, Callable[[int], None]], Iterator[Tokens]]
"""Reads the tokens of a file; its second argument is told of the bytes read."""


def _reader(source: PrepareSource, settings: PrepareSettings, tokenizer: Tokenizer) -> _Reader:
    """Return the reader of a source's files, which holds a share of the documents out."""
    share = source.validation_fraction

    def split_of(content: bytes) -> SplitName:
        return VALIDATION if is_held_out(content, share) else TRAIN

    if source.format == "chat":
        assert settings.tokenizer is not None, "checked before"
        template = ChatTemplate.load(settings.tokenizer, settings.chat_template)

        def conversations(path: Path, advance: Callable[[int], None]) -> Iterator[Tokens]:
            for number, record in read_json_lines(path, advance):
                where = f"{path}:{number}"
                messages = field_of(record, source.field or "messages", where)
                if not isinstance(messages, list) or not all(
                    isinstance(message, dict) for message in messages
                ):
                    raise UserError(f"{where}: the messages are no list of objects")
                context = {"tools": record["tools"]} if "tools" in record else {}
                try:
                    made = template.conversation(messages, tokenizer, **context)
                except ValueError as error:
                    raise UserError(f"{where}: {error}") from None
                if len(made.ids):
                    split = split_of(made.ids.astype(np.int32).tobytes())
                    yield Tokens(split, made.ids, True, 0, made.of_assistant)

        return conversations

    def documents(path: Path, advance: Callable[[int], None]) -> Iterator[Tokens]:
        if not _is_tokenized(path, source):
            yield from tokenized(_assigned(path, source, advance), tokenizer)
            return
        split: SplitName = TRAIN
        for piece in read_indexed(path, tokenizer, advance):
            if piece.first:
                split = split_of(piece.ids.astype(np.int32).tobytes())
            ids = _framed(piece.ids, tokenizer, piece.first, piece.last)
            yield Tokens(split, ids, piece.first, text_bytes=0)

    return documents


def _tokens(
    source: PrepareSource,
    files: list[Path],
    validation_files: list[Path],
    reader: _Reader,
    bar: Progress,
) -> Iterator[Tokens]:
    total = sum(_content(path, source).stat().st_size for path in [*files, *validation_files])
    advance = _task(bar, f"tokenizing {source.name}", total)
    for path in files:
        yield from reader(path, advance)
    for path in validation_files:
        for each in reader(path, advance):
            yield each._replace(split=VALIDATION)


def _assigned(
    path: Path, source: PrepareSource, advance: Callable[[int], None]
) -> Iterator[Assigned]:
    split: SplitName = TRAIN
    for piece in _pieces(path, source, advance):
        if piece.first:
            held_out = is_held_out(piece.text.encode(), source.validation_fraction)
            split = VALIDATION if held_out else TRAIN
        yield Assigned(split, piece)


def _is_tokenized(path: Path, source: PrepareSource) -> bool:
    return format_of(path, source.format) == "megatron"


def _content(path: Path, source: PrepareSource) -> Path:
    """Return the file that holds the documents which `path` names.

    Raises:
        UserError: it is missing.
    """
    content = path.with_suffix(".bin") if _is_tokenized(path, source) else path
    if not content.is_file():
        raise UserError(f"{path}: its tokens, {content.name}, are not beside it")
    return content


def _training_texts(
    settings: PrepareSettings, files: dict[str, tuple[list[Path], list[Path]]], bar: Progress
) -> Iterator[str]:
    total = sum(path.stat().st_size for paths, _ in files.values() for path in paths)
    share = min(1.0, settings.tokenizer_bytes / max(total, 1))
    advance = _task(bar, "reading for the tokenizer", int(total * share))
    for source in settings.sources:
        for path in files[source.name][0]:
            quota = path.stat().st_size * share
            held_out = False
            for piece in _pieces(path, source, advance):
                if piece.first:
                    held_out = is_held_out(piece.text.encode(), source.validation_fraction)
                if not held_out:
                    yield piece.text
                quota -= len(piece.text.encode())
                if quota <= 0 and share < 1:
                    break


def _pieces(path: Path, source: PrepareSource, advance: Callable[[int], None]) -> Iterator[Piece]:
    field = source.field or "text"
    return read_documents(path, format=source.format, field=field, advance=advance)


def _task(bar: Progress, description: str, total: int) -> Callable[[int], None]:
    task = bar.add_task(description, total=total)
    return lambda bytes_read: bar.advance(task, bytes_read)


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
