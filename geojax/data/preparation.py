"""Preparation of text: train or read a tokenizer, tokenize, and write shards into folders.

Documents that are tokenized already stream past the tokenizer into the same shards.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from geojax.data.atomic_folder import atomic_folder, refuse_taken
from geojax.data.documents import find_files
from geojax.data.file_tokens import (
    Appends,
    Counts,
    append_tokens,
    content_of,
    is_held_out,
    is_tokenized,
    pieces_of,
)
from geojax.data.progress import WorkProgress, work_progress
from geojax.data.settings import PrepareSettings, PrepareSource
from geojax.data.storage import (
    SPLITS,
    TOKENIZER,
    Prepared,
    SplitWriter,
    token_dtype,
    write_manifest,
)
from geojax.data.template_files import read_template
from geojax.data.tokenizer import Tokenizer
from geojax.data.workers import (
    WorkerSetup,
    append_from_workers,
    parts_of,
    reader_of,
    worker_count,
)
from geojax.errors import UserError


class SourceFiles(NamedTuple):
    """The files of a source."""

    files: list[Path]
    validation_files: list[Path]


def prepare(settings: PrepareSettings, *, progress: bool = False) -> list[Prepared]:
    """Prepare each source in a folder of its name below `settings.output`.

    Raises:
        UserError: an output exists, files are missing or unreadable, there is no text in them, or
            the share to hold out holds out no document.
    """
    for source in settings.sources:
        refuse_taken(settings.output / source.name)
    files = {
        source.name: SourceFiles(find_files(source.files), find_files(source.validation_files))
        for source in settings.sources
    }
    if settings.tokenizer is None:
        _require_tokenizer(settings, files)
    with work_progress(enabled=progress) as bar:
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
                _prepare_source(partial, source, settings, files[source.name], tokenizer, bar)
            prepared.append(Prepared(folder))
    return prepared


def _require_tokenizer(settings: PrepareSettings, files: Mapping[str, SourceFiles]) -> None:
    for source in settings.sources:
        for path in itertools.chain(*files[source.name]):
            if is_tokenized(path, source):
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
    folder: Path,
    fill: Callable[[Appends], Counts],
    tokenizer: Tokenizer,
    *,
    marked: bool = False,
) -> Counts:
    """Fill `folder` with the tokenizer, the shards and the manifest.

    Args:
        folder: an empty folder.
        fill: appends all tokens, and counts them.
        tokenizer: the tokenizer.
        marked: all tokens are those of conversations, and else none.
    """
    tokenizer.save(folder / TOKENIZER)
    dtype = token_dtype(tokenizer.vocabulary_size, marked=marked)
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(folder, split, dtype)) for split in SPLITS
        }
        counts = fill({split: writer.append for split, writer in writers.items()})
        splits = {
            split: writer.finish(counts.documents[split]) for split, writer in writers.items()
        }
    write_manifest(
        folder,
        tokenizer,
        splits,
        counts.text_bytes,
        text_tokens=counts.text_tokens,
        marked=marked,
    )
    return counts


def _prepare_source(
    folder: Path,
    source: PrepareSource,
    settings: PrepareSettings,
    files: SourceFiles,
    tokenizer: Tokenizer,
    bar: WorkProgress,
) -> None:
    """Tokenize the files of a source, in worker processes if it has more than one."""
    marked = source.format == "chat"
    reader = reader_of(source, settings, tokenizer)
    parts = list(parts_of(source, *files))
    total = sum(content_of(path, source).stat().st_size for path in itertools.chain(*files))
    advance = bar.begin(f"tokenizing {source.name}", total)
    count = worker_count(settings.workers, total)
    setup = WorkerSetup(
        folder=folder,
        source=source,
        settings=settings,
        beginning=tokenizer.beginning,
        end=tokenizer.end,
        dtype=token_dtype(tokenizer.vocabulary_size, marked=marked),
    )

    def fill(appends: Appends) -> Counts:
        if count > 1:
            return append_from_workers(setup, parts, count, appends, advance)
        read = (reader.read(part.path, advance, part.span, part.split) for part in parts)
        return append_tokens(itertools.chain.from_iterable(read), appends)

    if settings.tokenizer is not None:
        template = read_template(settings.tokenizer, settings.chat_template)
        if template is not None:  # a run's export has it again
            template.write(folder)
    _check_counts(source, write_prepared(folder, fill, tokenizer, marked=marked))


def _check_counts(source: PrepareSource, counts: Counts) -> None:
    """Check that there is something to learn from and, where it is wanted, to validate on.

    Raises:
        UserError: there is not.
    """
    train, held_out = (counts.documents[split] for split in SPLITS)
    total = train + held_out
    if source.files and total == held_out == 0:
        raise UserError(f"source '{source.name}': the files hold no text")
    if source.format == "chat" and not counts.of_assistant:
        raise UserError(
            f"source '{source.name}': no token of an assistant is in its {total} conversations, so "
            "that nothing would be learned"
        )
    if source.files and not train:
        raise UserError(
            f"source '{source.name}': no document is left to train on of {total}; "
            f"validation_fraction {source.validation_fraction:g} is too much, or the files hold no "
            "text"
        )
    if (source.validation_fraction or source.validation_files) and not held_out:
        raise UserError(
            f"source '{source.name}': the validation set is empty: validation_fraction "
            f"{source.validation_fraction:g}, drawn by each document's content, took none of "
            f"{total}; hold out more, or name validation_files"
            if source.validation_fraction
            else f"source '{source.name}': the validation_files hold no text"
        )


def _training_texts(
    settings: PrepareSettings, files: Mapping[str, SourceFiles], bar: WorkProgress
) -> Iterator[str]:
    total = sum(path.stat().st_size for paths in files.values() for path in paths.files)
    share = min(1.0, settings.tokenizer_bytes / max(total, 1))
    advance = bar.begin("reading for the tokenizer", int(total * share))
    for source in settings.sources:
        for path in files[source.name].files:
            quota = path.stat().st_size * share
            held_out = False
            for piece in pieces_of(path, source, advance):
                if piece.first:
                    held_out = is_held_out(piece.text.encode(), source.validation_fraction)
                if not held_out:
                    yield piece.text
                quota -= len(piece.text.encode())
                if quota <= 0 and share < 1:
                    break
    bar.begin("training the tokenizer")
