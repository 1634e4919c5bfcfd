"""`geojax data prepare`: turn text, or the tokens of Megatron-LM, into token shards."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from geojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class PrepareCommand:
    """Tokenize text into a folder that `geojax train` reads (`data.sources`: `prepared:`).

    Give one source as FILES and `--output`, or several sources with one tokenizer in the YAML file
    `--config`.
    """

    files: tyro.conf.Positional[tuple[str, ...]] = ()
    """Text files, JSON lines, Megatron-LM's .idx beside .bin, folders, or quoted globs
    ('texts/**/*.txt'). Text may be .gz."""

    output: Path | None = None
    """Folder to make."""

    config: Path | None = None
    """YAML file with output, sources, and tokenizer or vocab_size. Give it alone."""

    validation_files: tuple[str, ...] = ()
    """Files of the validation set."""

    validation_fraction: float = 0.0
    """Share of the documents that becomes the validation set, such as 0.01."""

    format: Literal["auto", "text", "jsonl", "megatron", "chat"] = "auto"
    """Format of the files. text: a file is a document. jsonl: a line is a document. megatron:
    documents that are already tokenized (.idx beside .bin). chat: a line is a conversation, and the
    loss counts only the assistant's words. auto: by suffix."""

    field: str | None = None
    """Key of the document in a JSON line; default: text, or messages for a conversation."""

    tokenizer: Path | None = None
    """tokenizer.json to use; without this option a tokenizer is trained."""

    chat_template: Path | None = None
    """Chat template of conversations. Default: the template beside the tokenizer
    (chat_template.jinja, or in tokenizer_config.json)."""

    vocab_size: int = 32768
    """Vocabulary size of the tokenizer that is trained."""

    beginning_token: str | None = None
    """Token of the given tokenizer that begins a document, if its name is unusual."""

    end_token: str | None = None
    """Token that ends a document."""

    workers: int | None = None
    """Processes that tokenize. Default: one for 64 MiB of files, at most one a core. The number
    does not change the result."""


def run(command: PrepareCommand) -> int:
    """Prepare the folders, print a table of them, and return the exit code 0."""
    from geojax.data import PrepareSettings, prepare
    from geojax.settings import load_yaml, validate

    if command.config is not None:
        if command != PrepareCommand(config=command.config):
            raise UserError("--config says everything: give it alone")
        settings = validate(PrepareSettings, load_yaml(command.config), str(command.config))
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
    output = command.output
    source = {
        "name": output.name,
        "files": command.files,
        "validation_files": command.validation_files,
        "validation_fraction": command.validation_fraction,
        "format": command.format,
        "field": command.field,
    }
    return {
        "output": output.parent,
        "sources": [source],
        "tokenizer": command.tokenizer,
        "chat_template": command.chat_template,
        "vocab_size": command.vocab_size,
        "beginning_token": command.beginning_token,
        "end_token": command.end_token,
        "workers": command.workers,
    }
