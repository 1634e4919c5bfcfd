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
from geojax.data.documents import Piece, find_files, format_of, read_documents
from geojax.data.indexed import read_indexed
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
        _refuse_tokenized(settings, files)
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
                tokens = _tokens(source, *files[source.name], tokenizer, bar)
                _write(partial, tokens, tokenizer, source)
            prepared.append(Prepared(folder))
    return prepared


def _refuse_tokenized(
    settings: PrepareSettings, files: dict[str, tuple[list[Path], list[Path]]]
) -> None:
    for source in settings.sources:
        for path in itertools.chain(*files[source.name]):
            if _is_tokenized(path, source):
                raise UserError(
                    f"{path}: holds tokens, not text; name the tokenizer.json that made them "
                    "(--tokenizer)"
                )


def write_prepared(folder: Path, tokens: Iterable[Tokens], tokenizer: Tokenizer) -> None:
    """Fill `folder` with the shards of `tokens`, the tokenizer and the manifest."""
    dtype = token_dtype(tokenizer.vocabulary_size)
    text_bytes = 0
    with (
        SplitWriter(folder, TRAIN, dtype) as train,
        SplitWriter(folder, VALIDATION, dtype) as validation,
    ):
        writers: dict[SplitName, SplitWriter] = {TRAIN: train, VALIDATION: validation}
        for each in tokens:
            writers[each.split].documents += each.first
            writers[each.split].append(each.ids)
            text_bytes += each.text_bytes
        splits = {name: writer.finish() for name, writer in writers.items()}
    write_manifest(folder, tokenizer, splits, text_bytes)


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

    def counted() -> Iterator[Tokens]:
        for each in tokens:
            counts[each.split] += each.first
            yield each

    write_prepared(folder, counted(), tokenizer)
    total = sum(counts.values())
    if source.files and total == counts[VALIDATION] == 0:
        raise UserError(f"source '{source.name}': the files hold no text")
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


def _tokens(
    source: PrepareSource,
    files: list[Path],
    validation_files: list[Path],
    tokenizer: Tokenizer,
    bar: Progress,
) -> Iterator[Tokens]:
    total = sum(_content(path, source).stat().st_size for path in [*files, *validation_files])
    advance = _task(bar, f"tokenizing {source.name}", total)
    for path in files:
        yield from _tokens_of_file(path, source, tokenizer, advance)
    for path in validation_files:
        for each in _tokens_of_file(path, source, tokenizer, advance):
            yield each._replace(split=VALIDATION)


def _tokens_of_file(
    path: Path, source: PrepareSource, tokenizer: Tokenizer, advance: Callable[[int], None]
) -> Iterator[Tokens]:
    """Yield the tokens of a file, of which a share of the documents is held out."""
    if _is_tokenized(path, source):
        split: SplitName = TRAIN
        for piece in read_indexed(path, tokenizer, advance):
            if piece.first:
                content = piece.ids.astype(np.int32).tobytes()
                split = VALIDATION if is_held_out(content, source.validation_fraction) else TRAIN
            ids = _framed(piece.ids, tokenizer, piece.first, piece.last)
            yield Tokens(split, ids, piece.first, text_bytes=0)
    else:
        yield from tokenized(_assigned(path, source, advance), tokenizer)


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
    return read_documents(path, format=source.format, field=source.field, advance=advance)


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
