"""A small Phi-3, and a Phi-4 whose head is tied."""

from small_families import SIZES, USUAL
from transformers import Phi3Config

FAMILIES = {
    "phi3": (Phi3Config(**SIZES, sliding_window=3), USUAL),
    "phi4-mini": (
        Phi3Config(
            **SIZES,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 2 / 3,
            },
        ),
        USUAL,
    ),
}
