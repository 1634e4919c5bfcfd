"""Sources of a run's text, opened and checked against each other."""

from collections.abc import Callable
from dataclasses import dataclass

from geojax.data.settings import DataSettings, SourceSettings
from geojax.data.storage import TRAIN, Prepared, read_manifest
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

OpenBuiltin = Callable[[DataSettings, bool], Prepared]
"""Function that prepares the builtin source, unless it is, and shows its progress if told to."""


@dataclass(frozen=True)
class Source:
    """A prepared folder and its share of the training sequences."""

    name: str
    prepared: Prepared
    weight: float


@dataclass(frozen=True)
class Corpus:
    """Sources with one tokenizer; weights sum to 1."""

    sources: tuple[Source, ...]

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
        for source, prepared in opened[1:]:
            if prepared.tokenizer.fingerprint != reference.tokenizer.fingerprint:
                raise UserError(
                    f"sources '{first.name}' and '{source.name}' were prepared with different "
                    "tokenizers; prepare them together, or one with the other's tokenizer.json"
                )
        weights = [_weight(source, prepared) for source, prepared in opened]
        for (source, prepared), weight in zip(opened, weights, strict=True):
            if not len(prepared.stream(TRAIN)) and (weight or source.weight is None):
                raise UserError(
                    f"source '{source.name}': {prepared.folder} has no tokens to train on; "
                    "give it weight 0 to use its validation set only"
                )
        total = sum(weights)
        return cls(
            tuple(
                Source(source.name, prepared, weight / total)
                for (source, prepared), weight in zip(opened, weights, strict=True)
            )
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of every source."""
        return self.sources[0].prepared.tokenizer

    @property
    def contents(self) -> dict[str, str]:
        """A hash of what each source holds, equal wherever it was prepared."""
        return {source.name: source.prepared.fingerprint for source in self.sources}


def check_sources(settings: DataSettings) -> None:
    """Look for the prepared folders and the tokenizer, and read no more than their manifests.

    Raises:
        UserError: one is missing or not prepared.
    """
    for source in settings.sources:
        if source.prepared is not None:
            read_manifest(source.prepared)
    if settings.tokenizer is not None:
        Tokenizer.load(settings.tokenizer)


def _open(
    source: SourceSettings, settings: DataSettings, builtin: OpenBuiltin | None, progress: bool
) -> Prepared:
    if source.prepared is not None:
        return Prepared(source.prepared)
    if builtin is None:
        raise UserError(
            f"data.sources: '{source.name}' is builtin, and nothing here prepares it; prepared: "
            "with a folder of `geojax data prepare` would do"
        )
    return builtin(settings, progress)


def _weight(source: SourceSettings, prepared: Prepared) -> float:
    return len(prepared.stream(TRAIN)) if source.weight is None else source.weight
