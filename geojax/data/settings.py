"""Settings of a run's `data:` section and of `geojax data prepare`."""

from typing import Annotated, Literal

import pydantic

from geojax.data.megatron.document_split import parse_split
from geojax.data.tokenizer import LARGEST_VOCABULARY, SMALLEST_VOCABULARY
from geojax.paths import ResolvedPath
from geojax.settings import Settings

Name = Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""Name of a source, which becomes a part of names of files and metrics."""

Order = Literal["geojax", "megatron"]
"""The order of a run's training sequences."""

Format = Literal["auto", "text", "jsonl", "chat", "openai", "sharegpt", "alpaca", "megatron"]
"""The format of files, or of the conversations in them."""


class SourceSettings(Settings):
    """One source of text to train on, or only to validate on (weight 0)."""

    name: Name
    """Name of the source in metrics, and of the validation set of its held-out documents."""
    builtin: Literal["python-stdlib"] | None = None
    """Corpus that needs no download: the source and documentation of Python's own library."""
    prepared: ResolvedPath | None = None
    """Folder made by `geojax data prepare`, instead of a builtin corpus."""
    megatron: ResolvedPath | None = None
    """Files of Megatron-LM, read in place: their common prefix, or the path of the .idx or .bin.
    `data.tokenizer` names the tokenizer that made them."""
    split: str | None = None
    """Shares of training, validation and test documents in the files of `megatron`, such as
    "969,30,1": ranges of documents, as Megatron-LM's `--split` cuts them. Default: all train."""
    weight: float | None = pydantic.Field(default=None, ge=0, le=1e12)
    """Share of the training sequences, relative to the other sources. Without any weights, shares
    follow the sources' tokens."""

    @pydantic.field_validator("split")
    @classmethod
    def _split_has_shares(cls, split: str | None) -> str | None:
        if split is not None:
            parse_split(split)
        return split

    @pydantic.model_validator(mode="after")
    def _one_origin(self) -> "SourceSettings":
        origins = (self.builtin, self.prepared, self.megatron)
        if sum(origin is not None for origin in origins) != 1:
            raise ValueError(
                f"source '{self.name}' needs one of prepared (a folder), megatron (a prefix of "
                "files) and builtin (python-stdlib)"
            )
        if self.split is not None and self.megatron is None:
            raise ValueError(
                f"source '{self.name}': split cuts files of Megatron-LM; remove it, or name them "
                "with megatron"
            )
        return self


class DataSettings(Settings):
    """Sources of a run's text.

    data:
      sources:
        - {name: wiki, prepared: data/wiki, weight: 0.7}
        - {name: code, prepared: data/code, weight: 0.3}
    """

    sources: tuple[SourceSettings, ...] = (SourceSettings(name="python", builtin="python-stdlib"),)
    """Sources of text, blended by their weights."""
    vocab_size: int = pydantic.Field(default=4096, ge=SMALLEST_VOCABULARY, le=LARGEST_VOCABULARY)
    """Vocabulary size of the tokenizer that is trained for a builtin corpus."""
    tokenizer: ResolvedPath | None = None
    """Tokenizer of the files of `megatron`; for a builtin corpus, instead of training one. It may
    be a file or a folder, of the kinds in docs/data.md."""
    order: Order = "geojax"
    """Order of the training sequences. geojax: every source shuffled anew in each epoch, whatever
    the run's length. megatron: the samples of Megatron-LM in its order, which depends on `steps`;
    every source needs `megatron`."""
    cache: ResolvedPath | None = None
    """Folder that keeps builtin corpora. Default: the user's cache folder."""

    @pydantic.model_validator(mode="after")
    def _sources_make_a_blend(self) -> "DataSettings":
        if not self.sources:
            raise ValueError("name at least one source")
        refuse_repeated([source.name for source in self.sources])
        weights = [source.weight for source in self.sources]
        if None in weights and any(weight is not None for weight in weights):
            missing = next(source.name for source in self.sources if source.weight is None)
            raise ValueError(f"give every source a weight, or none: '{missing}' has none")
        if all(weight == 0 for weight in weights):
            raise ValueError("every source has weight 0, so that nothing is left to train on")
        return self

    @pydantic.model_validator(mode="after")
    def _megatron_has_what_it_needs(self) -> "DataSettings":
        for source in self.sources:
            if source.megatron is not None and self.tokenizer is None:
                raise ValueError(
                    f"source '{source.name}' needs tokenizer, the tokenizer.json that made the "
                    "tokens of its files"
                )
            if source.megatron is None and self.order == "megatron":
                raise ValueError(
                    f"order: megatron requires files of megatron in every source, and "
                    f"'{source.name}' has none; order: geojax blends any sources"
                )
        return self


class SourceText(Settings):
    """Files of one source of text, and those that are held out for validation."""

    files: tuple[str, ...] = ()
    """Files, folders and globs (`**` crosses folders)."""
    validation_files: tuple[str, ...] = ()
    """Files, folders and globs of the validation set."""
    validation_fraction: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Share of the documents in `files` that becomes the validation set, instead of separate files.
    A hash of the text decides for each document, so equal documents are on one side."""
    format: Format = "auto"
    """Format of the files. auto: by suffix; the columns of records say whether they are documents
    or conversations. text: a file is a document. jsonl: JSON lines, whatever the suffix. chat:
    conversations, of which the loss counts only the assistant's words. openai, sharegpt, alpaca:
    conversations in this form. megatron: documents that are already tokenized (.idx beside
    .bin)."""
    text_field: str | None = None
    """Column of the text, or of the conversation. Default: `text`, or the only column of texts;
    `messages`, or the only column of conversations."""


class PrepareSource(SourceText):
    """Files that become one prepared folder."""

    name: Name
    """Name of the folder below `output`."""

    @pydantic.model_validator(mode="after")
    def _has_files(self) -> "PrepareSource":
        if not self.files and not self.validation_files:
            raise ValueError(f"source '{self.name}' names no files")
        if self.validation_fraction and self.validation_files:
            raise ValueError(
                f"source '{self.name}': give one of validation_fraction and validation_files"
            )
        if self.validation_fraction and not self.files:
            raise ValueError(
                f"source '{self.name}': validation_fraction needs files to hold out from"
            )
        return self


class Tokenization(Settings):
    """Tokenizer of prepared folders, and the processes that run it."""

    tokenizer: ResolvedPath | None = None
    """Tokenizer to use: a tokenizer.json, a model's folder, a tiktoken file or a SentencePiece
    model. Without one, a tokenizer is trained on the training files."""
    beginning_token: str | None = None
    """Token of `tokenizer` that begins a document; a folder's and well-known names are found
    without it."""
    end_token: str | None = None
    """Token of `tokenizer` that ends a document; a folder's and well-known names are found
    without it."""
    chat_template: ResolvedPath | None = None
    """Chat template of conversations. Default: the one beside the tokenizer (chat_template.jinja,
    or in tokenizer_config.json)."""
    vocab_size: int = pydantic.Field(default=32768, ge=SMALLEST_VOCABULARY, le=LARGEST_VOCABULARY)
    """Vocabulary size of the tokenizer that is trained."""
    workers: Annotated[int, pydantic.Field(ge=1, le=1024)] | None = None
    """Processes that tokenize. Default: one for 64 MiB of files, at most one a core. Their number
    does not change the folders by a byte."""


class PrepareSettings(Tokenization):
    """Settings of `geojax data prepare`: a folder for each source, all with one tokenizer."""

    output: ResolvedPath
    """Folder above the prepared folders."""
    sources: tuple[PrepareSource, ...]
    """Sources to prepare."""
    tokenizer_bytes: int = pydantic.Field(default=1 << 28, gt=0, le=1 << 40)
    """Bytes of text to train the tokenizer on, taken from the start of every file."""

    @pydantic.model_validator(mode="after")
    def _makes_sense(self) -> "PrepareSettings":
        if not self.sources:
            raise ValueError("name at least one source")
        refuse_repeated([source.name for source in self.sources])
        if self.tokenizer is None and (self.beginning_token or self.end_token):
            raise ValueError("beginning_token and end_token belong to a given tokenizer")
        if self.tokenizer is None and not any(source.files for source in self.sources):
            raise ValueError("a tokenizer is trained on training files, and no source has any")
        return self


def refuse_repeated(names: list[str]) -> None:
    """Raise a ValueError that gives the names which occur twice in `names`."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two sources are called '{name}'")
