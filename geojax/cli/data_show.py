"""`geojax data show`: a run's data as its model sees them, and the shards that are damaged."""

import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

import pydantic
import tyro
from rich.console import Console
from rich.table import Table

from geojax.cli.escaping import SPACE, escaped
from geojax.cli.sequence_lines import counted, sequence_lines
from geojax.errors import UserError
from geojax.paths import resolved_path
from geojax.quantities import Count, Length, quantity
from geojax.run_paths import CHECKPOINTS, CONFIG
from geojax.settings import Settings
from geojax.suggestions import listed, shortened

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.data import Batch, Corpus, Loader
    from geojax.data.batch_ramp import BatchRamp
    from geojax.data.preview import BatchFigures, ShownSequence, SourceFigures

_FOLDER_LENGTH, _FOLDER_BATCH = 1024, 64
"""Most tokens of a sequence and sequences of a batch, for a folder that is shown without a run."""
_LEGEND = (
    "Each token is its text above its number. (Number): the loss does not count this token. "
    f"{SPACE} is a space."
)


class DataShowCommand(Settings):
    """Show the data of a run as its model sees them: sources, a batch, and sequences of tokens.

    The argument is a run's YAML file, the directory of a run, which may be running, or one folder
    of `geojax data prepare`. Options change settings of a config: `--seed 1`. A folder is shown as
    a run of it alone would read it, with seed 0. The exit code is 2 if shards are damaged. Nothing
    is written, except that a builtin corpus is prepared on first use.
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG|RUN|FOLDER")]
    """YAML file of a run, directory of a run, or prepared folder."""

    step: int = pydantic.Field(default=0, ge=0, le=10**9)
    """Step of the batch, from 0."""

    sequences: Count = 1
    """Most sequences of the batch to print."""

    tokens: Length = 256
    """Most tokens of a sequence to print."""

    validation: str | None = None
    """Source whose validation set is shown, in place of training sequences; --step is the number
    of its batch."""

    sequence_length: Length | None = None
    """Tokens of a sequence. Default: the config's, or up to 1,024 for a folder."""

    json_lines: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="json")] = False
    """Print each sequence as a line of JSON, with all of its tokens, and nothing else."""

    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Read all shards, compare their SHA-256 with the manifests, name each that is damaged, and
    show nothing else."""

    @pydantic.model_validator(mode="after")
    def _options_go_together(self) -> Self:
        if self.verify and self.json_lines:
            raise ValueError("--json prints sequences, and --verify none; leave one of them out")
        return self


class _Reading(NamedTuple):
    """The way in which a run reads its corpus."""

    corpus: "Corpus"
    sequence_length: int
    sizes: "BatchRamp"
    """Sequences in the batch of each step."""
    seed: int = 0
    steps: int | None = None
    vocab_size: int | None = None
    validation_sequences: int = 256


def run(command: DataShowCommand, overrides: Sequence[str]) -> int:
    """Print what the command asks for and return the exit code 0.

    Raises:
        UserError: there are no such data, or shards are damaged.
    """
    from geojax.data.storage import MANIFEST, partial_path

    path = resolved_path(command.config)
    try:
        is_run = not ((path / MANIFEST).exists() or partial_path(path).exists())
    except PermissionError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); data that this user may read would do"
        ) from None
    config = _config(command, path, overrides) if is_run else None
    if config is None and overrides:
        raise UserError(
            f"geojax data show: {overrides[0]} changes a config, and {path} is a prepared folder; "
            "remove it"
        )
    _check_shards([path] if config is None else _folders(config), whole=command.verify)
    if command.verify:
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):  # a text may have what the terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    reading = _of_folder(command, path) if config is None else _of_config(config)
    console = Console(highlight=False, markup=False, emoji=False)
    sequences, batch = _read(command, reading)
    if command.json_lines:
        _print_json(reading, sequences)
    else:
        _print_sources(reading, console)
        _print_sequences(command, reading, sequences, batch, console)
    return 0


def _config(command: DataShowCommand, path: Path, overrides: Sequence[str]) -> "RunConfig":
    """Read the config of a run, from its YAML file or its directory.

    Raises:
        UserError: there is none, or it has a mistake.
    """
    file = command.config
    if path.is_dir():
        found = [path / CONFIG]
        if not found[0].exists() and (path / CHECKPOINTS).is_dir():
            found = sorted(path.glob(f"*/{CONFIG}"))  # islands have a directory each
        if not found or not found[0].exists():
            raise UserError(
                f"{path}: is neither a run's directory (no config.yaml) nor prepared data (no "
                "manifest.json); a folder of geojax data prepare would do"
            )
        file = found[0]
    # Imported here, so that a prepared folder is shown without the models.
    from geojax.config.run_config import RunConfig

    if command.sequence_length is not None:
        overrides = [*overrides, "--batch.sequence_length", str(command.sequence_length)]
    return RunConfig.load(file, overrides)


def _folders(config: "RunConfig") -> list[Path]:
    """Return the folders of a config's sources, of which a builtin one is prepared if need be."""
    from geojax.data.preparation.standard_library import open_standard_library

    return [
        source.prepared or open_standard_library(config.data, progress=True).folder
        for source in config.data.sources
        if source.megatron is None
    ]


def _check_shards(folders: Sequence[Path], *, whole: bool) -> None:
    """Check all shards, and print each problem, or what was verified.

    Raises:
        UserError: a shard, a manifest or a tokenizer is damaged.
    """
    from geojax.data.inspection import inspect_folders
    from geojax.data.storage import MANIFEST

    found = inspect_folders(folders, whole=whole, progress=True)
    if len(found.problems) == 1:
        raise UserError(found.problems[0])
    for problem in found.problems:
        print(escaped(problem), flush=True)
    if found.problems:
        where = escaped(listed(dict.fromkeys(folders)))
        raise UserError(
            f"{where}: {len(found.problems)} files are damaged, each in a line above; copy them "
            "again, or prepare the data again"
        )
    if whole:
        print(
            f"verified {counted(found.shards, 'shard')} of {quantity(found.bytes, 'B')}: each has "
            f"the size, the header and the SHA-256 that {MANIFEST} lists"
        )


def _of_folder(command: DataShowCommand, folder: Path) -> _Reading:
    """Read a folder as a run of it alone would."""
    from geojax.data import Corpus, Prepared, Source
    from geojax.data.batch_ramp import BatchRamp
    from geojax.data.storage import TRAIN

    prepared = Prepared(folder)
    tokens = prepared.token_count(TRAIN)
    if tokens < 2:
        raise UserError(
            f"{folder}: has no tokens to train on; a run's config that gives it weight 0 shows its "
            "validation set"
        )
    length = command.sequence_length or min(_FOLDER_LENGTH, tokens - 1)
    sequences = max(1, min(_FOLDER_BATCH, (tokens - 1) // length))
    corpus = Corpus((Source(folder.name, prepared, 1.0),))
    return _Reading(corpus, length, BatchRamp.constant(sequences))


def _of_config(config: "RunConfig") -> _Reading:
    from geojax.data import Corpus
    from geojax.data.preparation.standard_library import open_standard_library

    return _Reading(
        Corpus.open(config.data, open_standard_library),
        config.batch.sequence_length,
        config.batch.sizes,
        config.seed,
        config.steps,
        config.model.vocab_size,
        config.evaluation.sequences,
    )


def _read(command: DataShowCommand, reading: _Reading) -> "tuple[list[ShownSequence], Batch]":
    """Read the batch that is shown, or the first part of a large one.

    Raises:
        UserError: the run has no such step, or the data no such batch.
    """
    from geojax.data import Loader
    from geojax.data.preview import (
        summarized_sequences,
        training_sequences,
        validation_sequences,
    )

    size, step = reading.sizes.full, command.step
    loader = Loader(
        reading.corpus,
        sequence_length=reading.sequence_length,
        global_batch_size=size,
        sequences=range(summarized_sequences(reading.sequence_length, size, command.sequences)),
        ramp=reading.sizes,
        total_sequences=_total_sequences(reading),
        seed=reading.seed,
        vocab_size=reading.vocab_size,
        validation_sequences=reading.validation_sequences,
    )
    if command.validation is not None:
        batch = _validation_batch(loader, command.validation, step)
        shown = validation_sequences(command.validation, step, size, batch, command.sequences)
        return shown, batch
    if reading.steps is not None and step >= reading.steps:
        raise UserError(f"--step is {step:,}; the run has the steps 0 to {reading.steps - 1:,}")
    batch = loader.batch(step)
    return training_sequences(loader, step, batch, command.sequences), batch


def _validation_batch(loader: "Loader", name: str, step: int) -> "Batch":
    """Return a batch of a validation set.

    Raises:
        UserError: there is no such set, or it has fewer batches.
    """
    batches = loader.validation(name)
    before = sum(1 for _ in itertools.islice(batches, step))
    batch = next(batches, None)
    if batch is None:
        raise UserError(
            f"--step is {step:,}; the validation set has the batches 0 to {before - 1:,}"
        )
    return batch


def _print_json(reading: _Reading, sequences: "Sequence[ShownSequence]") -> None:
    from geojax.data.preview import TokenTexts

    texts = TokenTexts(reading.corpus.tokenizer)
    for sequence in sequences:
        print(json.dumps(sequence.to_json(texts)))


def _print_sources(reading: _Reading, console: Console) -> None:
    from geojax.data.preview import source_figures

    steps, sequences = reading.steps, _total_sequences(reading)
    sources = source_figures(reading.corpus, reading.sequence_length, sequences)
    console.print(_table(sources))
    for source in sources:
        console.print(escaped(f"{source.name}: {source.text.place}"), soft_wrap=True)
    if steps is not None and sequences is not None:
        console.print(
            f"{steps:,} steps of {_size_words(reading.sizes)} sequences of "
            f"{reading.sequence_length:,} tokens read "
            f"{quantity(sequences * reading.sequence_length)} tokens",
            soft_wrap=True,
        )


def _total_sequences(reading: _Reading) -> int | None:
    """Return the sequences that the whole run reads; None: its steps are not known."""
    return None if reading.steps is None else reading.sizes.consumed_after(reading.steps)


def _size_words(sizes: "BatchRamp") -> str:
    return f"{sizes.start:,} to {sizes.full:,}" if sizes.smaller else f"{sizes.full:,}"


def _table(sources: "Sequence[SourceFigures]") -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("source", overflow="fold")
    for name in ("documents", "tokens", "share", "epochs", "validation", "bytes/token"):
        table.add_column(name, justify="right")
    table.add_column("chat")
    for source in sources:
        bytes_per_token = source.text.bytes_per_token
        table.add_row(
            escaped(source.name),
            f"{source.text.documents:,}",
            f"{source.tokens:,}",
            f"{100 * source.share:.3g}%",
            "-" if source.epochs is None else f"{source.epochs:.3g}",
            f"{source.validation_tokens:,}",
            "-" if bytes_per_token is None else f"{bytes_per_token:.2f}",
            "yes" if source.text.are_conversations else "no",
        )
    return table


def _print_sequences(
    command: DataShowCommand,
    reading: _Reading,
    sequences: "Sequence[ShownSequence]",
    batch: "Batch",
    console: Console,
) -> None:
    from geojax.data.preview import TokenTexts, batch_figures

    what = f"step {command.step:,}"
    if command.validation is not None:
        what = f"batch {command.step:,} of the validation set {command.validation}"
    console.print()
    size = reading.sizes.full
    if command.validation is None:
        size = reading.sizes.size_at(reading.sizes.consumed_after(command.step))
    for figure in _summary(what, batch, batch_figures(batch), size):
        console.print(escaped(figure), soft_wrap=True)
    console.print()
    console.print(_LEGEND)
    texts = TokenTexts(reading.corpus.tokenizer)
    totals = {source.name: source.text.token_count("train") for source in reading.corpus.sources}
    for sequence in sequences:
        console.print()
        console.print(escaped(_title(sequence, totals)), style="bold")
        for line in sequence_lines(sequence, texts, command.tokens, console.width):
            console.print(line, soft_wrap=True)


def _summary(
    what: str, batch: "Batch", figures: "BatchFigures", global_batch_size: int
) -> Iterator[str]:
    """Yield the lines of a batch, or of its first sequences."""
    positions = max(figures.sequences * figures.sequence_length, 1)
    is_part = len(batch["tokens"]) < global_batch_size
    tokens = (positions - figures.padding) / max(figures.documents, 1)
    yield (
        f"{what}: {counted(figures.sequences, 'sequence')} of {figures.sequence_length:,} tokens"
        + (f", the first of {global_batch_size:,}" if is_part else "")
    )
    yield f"  positions that the loss counts  {figures.counted / positions:6.1%}"
    yield f"  positions of padding            {figures.padding / positions:6.1%}"
    yield f"  documents in a sequence         {figures.documents / max(figures.sequences, 1):6,.3g}"
    yield f"  tokens of a document in it      {tokens:6,.0f}"


def _title(sequence: "ShownSequence", totals: dict[str, int]) -> str:
    title = f"sequence {sequence.number:,}: source {shortened(sequence.source)}"
    if sequence.start is not None:
        title += f", from token {sequence.start:,} of {totals[sequence.source]:,}"
    return title
