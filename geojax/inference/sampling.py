"""Draws of the next token from logits.

Shapes: B texts, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from geojax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The way in which the next token is chosen."""

    temperature: float = 1.0
    """Divisor of the logits; 0 always takes the likeliest token."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability (Holtzman et al. 2020,
    "The Curious Case of Neural Text Degeneration")."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature is {self.temperature:g}; a number from 0 on would be right"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p:g}; more than 0 and at most 1 would be right")

    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Draw a token for each text, int32 [B], from `logits` [B, V] with `keys` [B]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_p < 1:
            logits = jnp.where(_is_in_nucleus(logits, self.top_p), logits, -jnp.inf)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def _is_in_nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Mark the fewest of the likeliest tokens whose probabilities sum to `top_p` or more."""
    descending = jnp.sort(logits, axis=-1, descending=True)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    count = (before < top_p).sum(axis=-1, keepdims=True)
    return logits >= jnp.take_along_axis(descending, count - 1, axis=-1)
