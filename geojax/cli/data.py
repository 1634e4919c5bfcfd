"""`geojax data prepare`: turn text, or the tokens of Megatron-LM, into token shards."""

from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from geojax.data.settings import SourceText, Tokenization
from geojax.errors import UserError


class PrepareCommand(SourceText, Tokenization):
    """Tokenize text into a folder that `geojax train` reads (`data.sources`: `prepared:`).

    Give one source as FILES and `--output`, or several sources with one tokenizer in the YAML file
    `--config`.
    """

    files: tyro.conf.Positional[tuple[str, ...]] = ()
    """Files of text, JSON, CSV, Parquet, Arrow or ArrayRecord, Megatron-LM's .idx beside .bin,
    folders, or quoted globs ('texts/**/*.txt'). Text, JSON and CSV may be .gz or .zst."""
    output: Path | None = None
    """Folder to make."""
    config: Path | None = None
    """YAML file with output, sources, and tokenizer or vocab_size. Give it alone."""


def run(command: PrepareCommand) -> int:
    """Prepare the folders, print a table of them, and return the exit code 0."""
    from geojax.data import PrepareSettings, prepare
    from geojax.settings import load_settings, validate

    if command.config is not None:
        if command != PrepareCommand(config=command.config):
            raise UserError("--config says everything: give it alone")
        settings = load_settings(PrepareSettings, command.config)
    else:
        settings = validate(PrepareSettings, _single_source(command), "geojax data prepare")
    prepared = prepare(settings, progress=True)
    table = Table("folder", "split", "documents", "tokens", "shards", box=None)
    for each in prepared:
        for name, split in each.manifest.splits.items():
            if split.documents:
                counts = (f"{split.documents:,}", f"{split.tokens:,}", str(len(split.shards)))
                table.add_row(str(each.folder), name, *counts)
    console = Console()
    console.print(table)
    words = f"vocabulary {prepared[0].tokenizer.vocabulary_size:,}"
    texts = [each.manifest for each in prepared if each.manifest.text_bytes]
    if texts:
        tokens = sum(each.tokens_of_text for each in texts)
        text_bytes = sum(each.text_bytes for each in texts)
        words += f", {text_bytes / tokens:.2f} bytes of text per token"
    console.print(words)
    return 0


def _single_source(command: PrepareCommand) -> dict[str, object]:
    if command.output is None:
        raise UserError("geojax data prepare: say where to with --output FOLDER")
    text = command.model_dump(include=set(SourceText.model_fields))
    tokenization = command.model_dump(include=set(Tokenization.model_fields))
    source = {"name": command.output.name, **text}
    return {"output": command.output.parent, "sources": [source], **tokenization}
