"""Generation of text, token by token, with a cache of keys and values.

Shapes: B prompts, S positions, L layers, N heads, K kv heads, D head dim, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.errors import UserError
from geojax.models.config import ModelConfig
from geojax.models.feed_forward import linear
from geojax.models.layers import project_heads, second_block
from geojax.models.parameters import Parameters
from geojax.models.rotary import rotary_table
from geojax.models.transformer import embed, head


def generate(
    parameters: Parameters,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: jax.Array,
) -> np.ndarray:
    """Generate `count` tokens after each prompt, int32 [B, count].

    One compiled scan walks the positions of all prompts together, each prompt's own tokens first.

    Args:
        parameters: the tree of `parameter_shapes`, whole on one device (or replicated).
        config: the model.
        prompts: token numbers, at least one each; lengths may differ.
        count: how many tokens to add to each.
        temperature: divisor of the logits; 0 always takes the most likely token.
        top_k: draw among this many most likely tokens only; None: among all.
        key: a JAX key for the draws.

    Raises:
        UserError: an argument is out of range, or the text would grow longer than learned
            positions reach.
    """
    _check(config, prompts, count, temperature, top_k)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    padded = np.zeros((len(prompts), int(np.max(lengths)) + count), np.int32)
    for index, prompt in enumerate(prompts):
        padded[index, : len(prompt)] = prompt
    if temperature == 0:
        temperature, top_k = 1.0, 1
    scale = jnp.float32(temperature)
    tokens = np.asarray(_continue(parameters, config, padded, lengths, scale, top_k, key))
    return np.stack([tokens[index, n : n + count] for index, n in enumerate(lengths)])


def _check(
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    count: int,
    temperature: float,
    top_k: int | None,
) -> None:
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise UserError("generate: give at least one prompt, each of at least one token")
    beyond = [token for prompt in prompts for token in prompt if not 0 <= token < config.vocab_size]
    if beyond:
        raise UserError(
            f"generate: token {beyond[0]} in a prompt is outside the model's vocabulary "
            f"(0 to {config.vocab_size - 1})"
        )
    if count < 1:
        raise UserError(f"generate: count is {count}, must be at least 1")
    if temperature < 0:
        raise UserError(f"generate: temperature is {temperature:g}, must be 0 or more")
    if top_k is not None and not 1 <= top_k <= config.vocab_size:
        raise UserError(f"generate: top_k is {top_k}, must be in 1 to {config.vocab_size}")
    if config.sliding_window is not None:
        raise UserError(
            "generate: a model with sliding_window is not carried; export it, or remove the prompts"
        )
    # The last token drawn is not read again.
    longest = max(len(prompt) for prompt in prompts) + count - 1
    if (
        config.position_embedding_type == "learned_absolute"
        and longest > config.max_position_embeddings
    ):
        raise UserError(
            f"generate: prompt and continuation take {longest} positions, the model has learned "
            f"{config.max_position_embeddings} (max_position_embeddings)"
        )


class _Cache(NamedTuple):
    """Keys and values of the positions so far, each [L, B, S, K, D]."""

    key: jax.Array
    value: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "top_k"))
def _continue(
    parameters: Parameters,
    config: ModelConfig,
    padded: jax.Array,
    lengths: jax.Array,
    temperature: jax.Array,
    top_k: int | None,
    key: jax.Array,
) -> jax.Array:
    """Fill in `padded` [B, S] behind each prompt's length."""
    batch, positions = padded.shape
    dtype = parameters["embedding"]["tokens"]["embedding"].dtype
    shape = (
        config.num_hidden_layers,
        batch,
        positions,
        config.num_key_value_heads,
        config.head_dim,
    )

    def step(
        carry: tuple[jax.Array, _Cache], position: jax.Array
    ) -> tuple[tuple[jax.Array, _Cache], jax.Array]:
        tokens, cache = carry
        logits, cache = _next_logits(parameters, config, tokens, position, cache)
        drawn = _draw(logits / temperature, top_k, jax.random.fold_in(key, position))
        given = lax.dynamic_index_in_dim(padded, position + 1, axis=1, keepdims=False)
        tokens = jnp.where(position + 1 < lengths, given, drawn)
        return (tokens, cache), tokens

    first = padded[:, 0]
    cache = _Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    _, rest = lax.scan(step, (first, cache), jnp.arange(positions - 1, dtype=jnp.int32))
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def _next_logits(
    parameters: Parameters,
    config: ModelConfig,
    tokens: jax.Array,
    position: jax.Array,
    cache: _Cache,
) -> tuple[jax.Array, _Cache]:
    """Return the logits [B, V] after `tokens` [B] at `position`, and the extended cache."""
    here = jnp.broadcast_to(position, (tokens.shape[0], 1))
    batch = {"tokens": tokens[:, None], "positions": here}
    x = embed(parameters["embedding"], batch, config, None)
    rotary = (
        rotary_table(here, config, x.dtype) if config.position_embedding_type == "rope" else None
    )

    def one_layer(
        carry: tuple[jax.Array, _Cache], layer_and_index: tuple[Parameters, jax.Array]
    ) -> tuple[tuple[jax.Array, _Cache], None]:
        (x, cache), (own, index) = carry, layer_and_index
        query, new_key, new_value = project_heads(own, x, rotary, config)
        zero = jnp.zeros_like(index)
        start = (index, zero, position, zero, zero)
        cache = _Cache(
            lax.dynamic_update_slice(cache.key, new_key[None], start),
            lax.dynamic_update_slice(cache.value, new_value[None], start),
        )
        mixed = _attend(query, cache.key[index], cache.value[index], position)
        x = x + linear(own["attention"]["output"], mixed)
        branch, _ = second_block(own, x, None, position[None], config)
        return (x + branch, cache), None

    indices = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    (x, cache), _ = lax.scan(one_layer, (x, cache), (parameters["layers"], indices))
    return head(parameters, x, config)[:, 0], cache


def _attend(query: jax.Array, key: jax.Array, value: jax.Array, position: jax.Array) -> jax.Array:
    """Attend with one query [B, 1, N, D] to the cache [B, S, K, D]; returns [B, 1, N D]."""
    batch, _, heads, dim = query.shape
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, key.shape[2], heads // key.shape[2], dim)
    scores = jnp.einsum("bkgd,bskd->bkgs", grouped, key, preferred_element_type=wide)
    visible = jnp.arange(key.shape[1]) <= position
    weights = jax.nn.softmax(jnp.where(visible, scores / np.sqrt(dim), -jnp.inf), axis=-1)
    mixed = jnp.einsum("bkgs,bskd->bkgd", weights, value.astype(wide))
    return mixed.reshape(batch, 1, heads * dim).astype(query.dtype)


def _draw(logits: jax.Array, top_k: int | None, key: jax.Array) -> jax.Array:
    """Draw one token a prompt, int32 [B], from `logits` [B, V]."""
    if top_k == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is not None:
        least = lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
