"""The model's vocabulary where a config leaves it out: that of the data's tokenizer, padded."""

from collections.abc import Mapping
from typing import Any

import pydantic

from geojax.data import DataSettings, Tokenizer
from geojax.data.storage import read_manifest
from geojax.errors import UserError

VOCABULARY_MULTIPLE = 128
"""The vocabulary of a tokenizer is padded to a multiple of this, so that the ranks of `tensor` hold
equal parts in sizes that suit matrix units. It is the same for every mesh: a run resumes on any."""


def with_vocabulary(model: Any, data: Any) -> Any:
    """Return the `model` of a config with a `vocab_size`, where it describes sizes without one.

    Args:
        model: value of the key, as it was read.
        data: value of the key `data`, likewise.

    Raises:
        UserError: the data's tokenizer cannot be read.
    """
    if not isinstance(model, Mapping) or model.get("vocab_size") is not None:
        return model
    if "vocab_size" not in model and model.keys() & {"preset", "huggingface"}:
        return model  # these tell it
    try:
        settings = DataSettings.model_validate({} if data is None else data)
    except pydantic.ValidationError:
        # The config is refused for this section: any size keeps that the one mistake named.
        return {**model, "vocab_size": VOCABULARY_MULTIPLE}
    return {**model, "vocab_size": _padded(_tokenizer_size(settings))}


def padding_note(vocab_size: int, tokenizer: Tokenizer) -> str | None:
    """Say by how much the model's vocabulary is larger than the tokenizer's; None: it is not."""
    if vocab_size == tokenizer.vocabulary_size:
        return None
    return f"vocabulary of {vocab_size:,}, of which the tokenizer has {tokenizer.vocabulary_size:,}"


def _tokenizer_size(settings: DataSettings) -> int:
    """Read the number of tokens of the sources' common tokenizer, but no tokens."""
    prepared = next((source.prepared for source in settings.sources if source.prepared), None)
    try:
        if prepared is not None:
            return read_manifest(prepared).tokenizer.vocabulary_size
        if settings.tokenizer is not None:
            return Tokenizer.load(settings.tokenizer).vocabulary_size
    except UserError as error:
        raise UserError(
            f"model.vocab_size is left out and must follow from the data: {error}; or give it"
        ) from None
    return settings.vocab_size


def _padded(tokens: int) -> int:
    return -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
