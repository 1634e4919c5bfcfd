"""Preparation of text: train or read a tokenizer, tokenize, and write shards into folders.

Documents that are tokenized already stream past the tokenizer into the same shards. A preparation
may be killed at any moment, and the same call goes on: tokens and shards that were written stay.
"""

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import tokenizers

from geojax.data.files.formats import find_files, holds_tokens, record_file_of
from geojax.data.files.text import PIECE_CHARACTERS
from geojax.data.preparation.atomic_folder import resumable_folders
from geojax.data.preparation.file_tokens import (
    Appends,
    Counts,
    columns_of,
    content_of,
    is_held_out,
    pieces_of,
)
from geojax.data.preparation.part_tokens import SAVED_TOKENS
from geojax.data.preparation.shard_assembly import ShardAssembly
from geojax.data.preparation.workers import (
    PART_BYTES,
    WorkerSetup,
    parts_of,
    tokenize_parts,
    worker_count,
)
from geojax.data.progress import WorkProgress, work_progress
from geojax.data.settings import PrepareSettings, PrepareSource
from geojax.data.storage import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    VERSION,
    Prepared,
    SplitWriter,
    token_dtype,
    write_manifest,
)
from geojax.data.templates.template_files import TemplateText, read_template
from geojax.data.tokenizer import BEGINNING, END, Tokenizer
from geojax.errors import UserError


class SourceFiles(NamedTuple):
    """The files of a source, and what they hold."""

    files: list[Path]
    validation_files: list[Path]
    are_conversations: bool

    @property
    def all(self) -> Iterator[Path]:
        """All files, those of the validation set last."""
        return itertools.chain(self.files, self.validation_files)


def prepare(settings: PrepareSettings, *, progress: bool = False) -> list[Prepared]:
    """Prepare each source in a folder of its name below `settings.output`.

    All folders are made together, when the last one is done.

    Raises:
        UserError: an output exists, files are missing or unreadable, there is no text in them, or
            the share to hold out holds out no document.
        RunError: a worker was killed; the same call goes on.
    """
    with work_progress(enabled=progress) as bar:
        bar.begin("looking at the files")
        sources = {source.name: _files_of(source, settings) for source in settings.sources}
        folders = [settings.output / name for name in sources]
        given, template = None, None
        if settings.tokenizer is not None:
            given = Tokenizer.load(
                settings.tokenizer, beginning=settings.beginning_token, end=settings.end_token
            )
            template = read_template(settings.tokenizer, settings.chat_template)
        identity = _identity(settings, sources, given, template)
        with resumable_folders(folders, identity, told=bar.say) as partials:
            if partials is not None:
                tokenizer = given or _trained(partials[0], settings, sources, bar)
                for source, partial in zip(settings.sources, partials, strict=True):
                    if template is not None:  # a run's export has it again
                        template.write(partial)
                    _prepare_source(partial, source, settings, sources[source.name], tokenizer, bar)
        return [Prepared(folder) for folder in folders]


def write_prepared(
    folder: Path,
    fill: Callable[[Appends], Counts],
    tokenizer: Tokenizer,
) -> None:
    """Fill `folder` with the tokenizer, the shards and the manifest.

    Args:
        folder: an empty folder.
        fill: appends all tokens, and counts them.
        tokenizer: the tokenizer.
    """
    tokenizer.save(folder / TOKENIZER)
    dtype = token_dtype(tokenizer.vocabulary_size)
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(SplitWriter(folder, split, dtype)) for split in SPLITS
        }
        counts = fill({split: writer.append for split, writer in writers.items()})
        splits = {
            split: writer.finish(counts.documents[split]) for split, writer in writers.items()
        }
    write_manifest(
        folder, tokenizer, splits, counts.text_bytes, text_tokens=counts.text_tokens, marked=False
    )


def _files_of(source: PrepareSource, settings: PrepareSettings) -> SourceFiles:
    """Find the files of a source, and see what they hold.

    Raises:
        UserError: there are none, some hold conversations and others do not, or only a tokenizer
            that is given could read them.
    """
    found = SourceFiles(find_files(source.files), find_files(source.validation_files), False)
    kinds: dict[bool, Path] = {}
    for path in found.all:
        are_tokens = holds_tokens(path, source.format)
        if are_tokens and settings.tokenizer is None:
            raise UserError(
                f"{path}: holds tokens, not text; name the tokenizer.json that made them "
                "(--tokenizer)"
            )
        content_of(path, source)
        if are_tokens or record_file_of(path, source.format) is None:
            kinds.setdefault(False, path)
        elif (columns := columns_of(path, source)) is not None:  # empty files fit anywhere
            kinds.setdefault(columns.are_conversations, path)
    if len(kinds) > 1:
        raise UserError(
            f"source '{source.name}': {kinds[True]} holds conversations and {kinds[False]} does "
            "not; make two sources of them, or choose with --format or --text-field"
        )
    if True in kinds and settings.tokenizer is None:
        raise UserError(
            f"{kinds[True]}: conversations are read with a model's tokenizer and its chat "
            "template; name it (--tokenizer)"
        )
    return found._replace(are_conversations=True in kinds)


def _identity(
    settings: PrepareSettings,
    sources: Mapping[str, SourceFiles],
    given: Tokenizer | None,
    template: TemplateText | None,
) -> str:
    """Return a hash of all that the folders depend on; the number of workers is not among it."""
    described = [
        settings.model_dump_json(exclude={"workers", "output", "tokenizer", "chat_template"}),
        None if given is None else given.fingerprint,
        None if template is None else list(template[:2]),
        [
            [str(path), status.st_size, status.st_mtime_ns]
            for source in settings.sources
            for path in sources[source.name].all
            for status in [content_of(path, source).stat()]
        ],
        [VERSION, PART_BYTES, SAVED_TOKENS, PIECE_CHARACTERS, tokenizers.__version__],
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _trained(
    folder: Path,
    settings: PrepareSettings,
    sources: Mapping[str, SourceFiles],
    bar: WorkProgress,
) -> Tokenizer:
    """Train the tokenizer, unless an interrupted call did, and keep it in the first folder."""
    path = folder / TOKENIZER
    if path.exists():
        return Tokenizer.load(path, beginning=BEGINNING, end=END)
    texts = _training_texts(settings, sources, bar)
    tokenizer = Tokenizer.train(texts, vocabulary_size=settings.vocab_size)
    tokenizer.save(path)
    return tokenizer


def _prepare_source(
    folder: Path,
    source: PrepareSource,
    settings: PrepareSettings,
    files: SourceFiles,
    tokenizer: Tokenizer,
    bar: WorkProgress,
) -> None:
    """Tokenize the files of a source, in worker processes if it has more than one part."""
    assembly = ShardAssembly(folder, tokenizer, marked=files.are_conversations)
    if (folder / MANIFEST).exists():
        assembly.remove_parts()
        return
    tokenizer.save(folder / TOKENIZER)
    parts = list(parts_of(source, files.files, files.validation_files))
    total = sum(content_of(path, source).stat().st_size for path in files.all)
    setup = WorkerSetup(
        folder=folder,
        source=source,
        settings=settings,
        beginning=tokenizer.beginning,
        end=tokenizer.end,
        dtype=assembly.dtype,
        are_conversations=files.are_conversations,
    )
    advance = bar.begin(f"tokenizing {source.name}", total)
    with assembly:
        tokenize_parts(
            setup, parts, worker_count(settings.workers, total), assembly.append, advance
        )
        bar.begin(f"writing {source.name}")
        _check_counts(source, assembly.counts, are_conversations=files.are_conversations)
        assembly.finish()


def _check_counts(source: PrepareSource, counts: Counts, *, are_conversations: bool) -> None:
    """Check that there is something to learn from and, where it is wanted, to validate on.

    Raises:
        UserError: there is not.
    """
    train, held_out = (counts.documents[split] for split in SPLITS)
    total = train + held_out
    if source.files and total == held_out == 0:
        raise UserError(f"source '{source.name}': the files hold no text")
    if are_conversations and not counts.of_assistant:
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
    settings: PrepareSettings, sources: Mapping[str, SourceFiles], bar: WorkProgress
) -> Iterator[str]:
    total = sum(path.stat().st_size for found in sources.values() for path in found.files)
    share = min(1.0, settings.tokenizer_bytes / max(total, 1))
    advance = bar.begin("reading for the tokenizer", int(total * share))
    for source in settings.sources:
        for path in sources[source.name].files:
            quota = path.stat().st_size * share
            held_out = False
            for piece in pieces_of(path, source, advance):
                content = piece.text.encode()
                if piece.first:
                    held_out = is_held_out(content, source.validation_fraction)
                if not held_out:
                    yield piece.text
                quota -= len(content)
                if quota <= 0 and share < 1:
                    break
    bar.begin("training the tokenizer")
