"""Preparation of text: train or read a tokenizer, tokenize, and write shards into folders.

Text streams through: at any time a few megabytes of it are in memory, whatever the files' sizes.
"""

import hashlib
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
from geojax.data.documents import Piece, find_files, read_documents
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
    """A piece of a document and the split that the document belongs to."""

    split: SplitName
    piece: Piece


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
                documents = _assigned_documents(source, *files[source.name], bar)
                _write(partial, documents, tokenizer, source)
            prepared.append(Prepared(folder))
    return prepared


def write_prepared(folder: Path, documents: Iterable[Assigned], tokenizer: Tokenizer) -> None:
    """Tokenize `documents` and fill `folder` with their shards, the tokenizer and the manifest."""
    dtype = token_dtype(tokenizer.vocabulary_size)
    text_bytes = 0
    with (
        SplitWriter(folder, TRAIN, dtype) as train,
        SplitWriter(folder, VALIDATION, dtype) as validation,
    ):
        writers: dict[SplitName, SplitWriter] = {TRAIN: train, VALIDATION: validation}
        for batch in _batches(documents):
            ids_of_pieces = tokenizer.encode_batch([piece.text for _, piece in batch])
            for (split, piece), ids in zip(batch, ids_of_pieces, strict=True):
                if piece.first:
                    writers[split].documents += 1
                    ids = [tokenizer.bos_id, *ids]
                if piece.last and tokenizer.eos_id != tokenizer.bos_id:
                    ids = [*ids, tokenizer.eos_id]
                writers[split].append(np.asarray(ids, dtype))
                text_bytes += len(piece.text.encode())
        splits = {name: writer.finish() for name, writer in writers.items()}
    write_manifest(folder, tokenizer, splits, text_bytes)


def is_held_out(text: str, share: float) -> bool:
    """Return whether the document that begins with `text` is in the held-out `share`."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
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
    folder: Path, documents: Iterable[Assigned], tokenizer: Tokenizer, source: PrepareSource
) -> None:
    counts = {TRAIN: 0, VALIDATION: 0}

    def counted() -> Iterator[Assigned]:
        for assigned in documents:
            counts[assigned.split] += assigned.piece.first
            yield assigned

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


def _assigned_documents(
    source: PrepareSource, files: list[Path], validation_files: list[Path], bar: Progress
) -> Iterator[Assigned]:
    total = sum(path.stat().st_size for path in [*files, *validation_files])
    advance = _task(bar, f"tokenizing {source.name}", total)
    for path in files:
        split: SplitName = TRAIN
        for piece in _pieces(path, source, advance):
            if piece.first:
                split = VALIDATION if is_held_out(piece.text, source.validation_fraction) else TRAIN
            yield Assigned(split, piece)
    for path in validation_files:
        for piece in _pieces(path, source, advance):
            yield Assigned(VALIDATION, piece)


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
                    held_out = is_held_out(piece.text, source.validation_fraction)
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
