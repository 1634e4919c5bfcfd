"""Sample text of a trained model."""

from typing import Any

from geojax.config.run_config import SampleSettings
from geojax.data import Tokenizer
from geojax.inference.decoder import undecodable_reason
from geojax.inference.generation import encode_prompts, most_new_tokens, write_texts
from geojax.inference.loaded_model import LoadedModel
from geojax.inference.sampling import Sampling
from geojax.models import ModelConfig


def unsampled_reason(model: ModelConfig) -> str | None:
    """Say why a model cannot write; None: it can."""
    reason = undecodable_reason(model)
    return None if reason is None else f"the decoder does not carry the model's {reason}"


def sample_texts(
    weights: Any, model: ModelConfig, tokenizer: Tokenizer, settings: SampleSettings, seed: int
) -> list[str]:
    """Continue each prompt to the end of the document; the texts include the prompts.

    A text ends where the model's positions do.
    """
    room = most_new_tokens(model, encode_prompts(model, tokenizer, settings.prompts))
    if room < 1:
        return list(settings.prompts)
    texts = write_texts(
        LoadedModel.on_one_device(model, weights),
        tokenizer,
        settings.prompts,
        max_new_tokens=min(settings.max_new_tokens, room),
        sampling=Sampling(settings.temperature),
        seed=seed,
    )
    return list(texts)
