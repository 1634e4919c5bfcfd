"""Sample text of a trained model."""

from typing import Any

from geojax.config.run_config import SampleSettings
from geojax.data import Tokenizer
from geojax.inference.generation import encode_prompts, most_new_tokens, write_texts
from geojax.inference.loaded_model import LoadedModel
from geojax.inference.sampling import Sampling
from geojax.models import AnyModel


def sample_texts(
    weights: Any, model: AnyModel, tokenizer: Tokenizer, settings: SampleSettings, seed: int
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
