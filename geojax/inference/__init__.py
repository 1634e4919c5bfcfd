"""A trained model at work: its weights on a mesh, text that it writes, and likelihoods of text."""

from geojax.inference.generation import (
    check_request,
    encode_prompts,
    generate,
    most_new_tokens,
    write_continuations,
    write_texts,
)
from geojax.inference.loaded_model import LoadedModel
from geojax.inference.sampling import Sampling

__all__ = [
    "LoadedModel",
    "Sampling",
    "check_request",
    "encode_prompts",
    "generate",
    "most_new_tokens",
    "write_continuations",
    "write_texts",
]
