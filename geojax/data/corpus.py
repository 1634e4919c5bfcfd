"""Sources of a run's text, opened and checked against each other."""

from collections.abc import Callable
from dataclasses import dataclass

from geojax.data.megatron.megatron_text import MegatronText, check_files
from geojax.data.settings import DataSettings, Order, SourceSettings
from geojax.data.storage import TRAIN, Prepared, read_manifest
from geojax.data.tokenized_text import TokenizedText
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

OpenBuiltin = Callable[[DataSettings, bool], Prepared]
"""Function that prepares the builtin source, unless it is, and shows its progress if told to."""


@dataclass(frozen=True)
class Source:
    """A text and its share of the training sequences."""

    name: str
    text: TokenizedText
    weight: float
    given_weight: float | None = None
    """Weight in the settings, before all are divided by their sum; None: they have none."""


@dataclass(frozen=True)
class Corpus:
    """Sources with one tokenizer; weights sum to 1."""

    sources: tuple[Source, ...]
    order: Order = "geojax"

    @classmethod
    def open(
        cls,
        settings: DataSettings,
        builtin: OpenBuiltin | None = None,
        *,
        progress: bool = False,
    ) -> "Corpus":
        """Open every source.

        Raises:
            UserError: a source is missing, damaged, has nothing to train on, or has another
                tokenizer than the first source.
        """
        opened = [
            (source, _open(source, settings, builtin, progress)) for source in settings.sources
        ]
        first, reference = opened[0]
        for source, text in opened[1:]:
            if text.tokenizer.fingerprint != reference.tokenizer.fingerprint:
                raise UserError(
                    f"sources '{first.name}' and '{source.name}' were prepared with different "
                    "tokenizers; prepare them together, or one with the other's tokenizer.json"
                )
        weights = [_weight(source, text) for source, text in opened]
        for (source, text), weight in zip(opened, weights, strict=True):
            if not text.token_count(TRAIN) and (weight or source.weight is None):
                raise UserError(
                    f"source '{source.name}' has no tokens to train on; give it weight 0 to use "
                    "its validation set only"
                )
        total = sum(weights)
        sources = tuple(
            Source(source.name, text, weight / total, source.weight)
            for (source, text), weight in zip(opened, weights, strict=True)
        )
        return cls(sources, settings.order)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of every source."""
        return self.sources[0].text.tokenizer

    @property
    def contents(self) -> dict[str, str]:
        """A hash of what each source holds, equal wherever it was prepared."""
        return {source.name: source.text.fingerprint for source in self.sources}


def check_sources(settings: DataSettings) -> None:
    """Look for the sources and the tokenizer, and read no more than manifests and headers.

    Raises:
        UserError: one is missing, not prepared, or no file of Megatron-LM's.
    """
    for source in settings.sources:
        if source.prepared is not None:
            read_manifest(source.prepared)
        if source.megatron is not None:
            check_files(source.megatron)
    if settings.tokenizer is not None:
        Tokenizer.load(settings.tokenizer)


def _open(
    source: SourceSettings, settings: DataSettings, builtin: OpenBuiltin | None, progress: bool
) -> TokenizedText:
    if source.prepared is not None:
        return Prepared(source.prepared)
    if source.megatron is not None:
        assert settings.tokenizer is not None, "settings refuse the source without a tokenizer"
        return MegatronText(source.megatron, settings.tokenizer, source.split)
    if builtin is None:
        raise UserError(
            f"data.sources: '{source.name}' is builtin, and nothing here prepares it; prepared: "
            "with a folder of `geojax data prepare` would do"
        )
    return builtin(settings, progress)


def _weight(source: SourceSettings, text: TokenizedText) -> float:
    return text.token_count(TRAIN) if source.weight is None else source.weight
