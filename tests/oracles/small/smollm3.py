"""A small SmolLM3 whose first and third layer have no positions."""

from small_families import SIZES, USUAL
from transformers import SmolLM3Config

FAMILIES = {
    "smollm3": (
        SmolLM3Config(
            **SIZES | {"num_hidden_layers": 3},
            no_rope_layers=[0, 1, 0],
            tie_word_embeddings=False,
        ),
        USUAL,
    ),
}
