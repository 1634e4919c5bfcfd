"""The decoder: the model token by token, with a cache of keys and values.

Prompts of different lengths are padded on the left, so that all of them end in one slot and every
new token goes into the same slot of the cache:

    slot                0  1  2  3  4 | 5  6
    prompt of 5         a  b  c  d  e | x  y         padding 0
    prompt of 2         -  -  -  f  g | x  y         padding 3; f has position 0

Everything may run inside a `shard_map`, with the ranks' shards of weights and of prompts.

Shapes: B prompts, P slots of the prompts, S slots of the cache, L layers, H hidden, N heads, K kv
heads, D head dim, V vocabulary; W dims of a value.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.attention import attention
from geojax.models.config import ModelConfig
from geojax.models.declaration import Parameters
from geojax.models.feed_forward import linear
from geojax.models.head import head, soft_cap
from geojax.models.layers import (
    attention_sinks,
    is_windowed,
    layer_rotary,
    post_norm,
    project_heads,
    rotary_tables,
    second_block,
)
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.rotary import score_scale
from geojax.models.transformer import embed


class Cache(NamedTuple):
    """Keys and values of the slots so far, [L, B, S, K, D] and [L, B, S, K, W].

    Those of latent attention are kept as its heads read them, not as latents.
    """

    key: jax.Array
    value: jax.Array


class Decoded(NamedTuple):
    """The results of one pass."""

    logits: jax.Array
    """Logits of the token after the last slot, [B, V], in at least float32, on all ranks."""
    cache: Cache


Attend = Callable[[jax.Array, Cache], tuple[jax.Array, Cache]]
"""Queries [B, slots, N, D] of the new slots, with their keys and values [B, slots, K, D], to the
mixed values [B, slots, N, D] and the cache."""


def prefill(
    parameters: Parameters,
    tokens: jax.Array,
    padding: jax.Array,
    config: ModelConfig,
    *,
    slots: int,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> Decoded:
    """Read the prompts in one pass and begin the cache.

    Args:
        parameters: the tree of `parameter_shapes`.
        tokens: int32 [B, P], padded on the left.
        padding: int32 [B], the slots of padding before each prompt.
        config: the model, which has no `undecodable_reason`; its experts drop no token.
        slots: slots that the cache gets (S), at least P.
        parallelism: how the model is sharded.
    """
    config = config.replace(capacity_factor=None)
    width = tokens.shape[1]
    prompt_slots = jnp.arange(width, dtype=jnp.int32)
    segment_ids = (prompt_slots >= padding[:, None]).astype(jnp.int32)
    positions = jnp.maximum(prompt_slots - padding[:, None], 0)
    x = _embed(parameters, tokens, positions, config, parallelism)
    tables = rotary_tables(positions, config, x.dtype)

    def one_layer(
        x: jax.Array, layer_and_index: tuple[Parameters, jax.Array]
    ) -> tuple[jax.Array, Cache]:
        own, index = layer_and_index

        def attend(query: jax.Array, new: Cache) -> tuple[jax.Array, Cache]:
            mixed = attention(
                query,
                *new,
                segment_ids,
                scale=score_scale(config),
                softcap=config.attn_logit_softcapping,
                window=config.sliding_window,
                is_windowed=is_windowed(index, config),
                sinks=attention_sinks(own),
                parallelism=parallelism,
            )
            return mixed, new

        rotary = layer_rotary(*tables, index, config)
        return _layer(own, x, rotary, attend, segment_ids, prompt_slots, config, parallelism)

    x, new = _scan_layers(one_layer, x, parameters, config)
    room = ((0, 0), (0, 0), (0, slots - width), (0, 0), (0, 0))
    cache = jax.tree.map(lambda leaf: jnp.pad(leaf, room), new)
    return Decoded(whole_logits(parameters, x[:, -1], config, parallelism), cache)


def decode(
    parameters: Parameters,
    tokens: jax.Array,
    slot: jax.Array,
    padding: jax.Array,
    cache: Cache,
    config: ModelConfig,
    *,
    parallelism: Parallelism = SINGLE_DEVICE,
) -> Decoded:
    """Read one more token of each text, and extend the cache.

    Args:
        parameters: as in `prefill`.
        tokens: int32 [B].
        slot: int32 [], the slot of these tokens.
        padding: as in `prefill`.
        cache: of all slots before.
        config: as in `prefill`.
        parallelism: how the model is sharded.
    """
    config = config.replace(capacity_factor=None)
    positions = slot - padding[:, None]
    x = _embed(parameters, tokens[:, None], positions, config, parallelism)
    tables = rotary_tables(positions, config, x.dtype)
    all_slots = jnp.arange(cache.key.shape[2], dtype=jnp.int32)
    visible = (all_slots <= slot) & (all_slots >= padding[:, None])

    def one_layer(
        carry: tuple[jax.Array, Cache], layer_and_index: tuple[Parameters, jax.Array]
    ) -> tuple[tuple[jax.Array, Cache], None]:
        (x, cache), (own, index) = carry, layer_and_index

        def attend(query: jax.Array, new: Cache) -> tuple[jax.Array, Cache]:
            zero = jnp.zeros_like(index)
            start = (index, zero, slot, zero, zero)
            extended = jax.tree.map(
                lambda leaf, of_slot: lax.dynamic_update_slice(leaf, of_slot[None], start),
                cache,
                new,
            )
            of_layer = Cache(extended.key[index], extended.value[index])
            seen = visible
            if config.sliding_window is not None:
                near = slot - all_slots < config.sliding_window
                windowed = is_windowed(index, config)
                seen &= near if windowed is None else near | ~windowed
            return _attend_to_slots(query, of_layer, seen, attention_sinks(own), config), extended

        rotary = layer_rotary(*tables, index, config)
        return _layer(own, x, rotary, attend, None, slot[None], config, parallelism), None

    (x, cache), _ = _scan_layers(one_layer, (x, cache), parameters, config)
    return Decoded(whole_logits(parameters, x[:, -1], config, parallelism), cache)


def _scan_layers(
    one_layer: Callable[..., tuple[Any, Any]],
    carry: Any,
    parameters: Parameters,
    config: ModelConfig,
) -> tuple[Any, Any]:
    """Scan `one_layer` over first dense layers, and over all others; results are stacked."""
    numbers = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
    dense = config.first_k_dense_replace
    if not dense:
        return lax.scan(one_layer, carry, (parameters["layers"], numbers))
    first = parameters["embedding"]["dense_layers"], numbers[:dense]
    carry, of_first = lax.scan(one_layer, carry, first)
    carry, of_others = lax.scan(one_layer, carry, (parameters["layers"], numbers[dense:]))
    return carry, jax.tree.map(lambda *stacks: jnp.concatenate(stacks), of_first, of_others)


def _embed(
    parameters: Parameters,
    tokens: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism,
) -> jax.Array:
    """Embed new tokens [B, slots] as the stream [B, slots, H]."""
    batch = {"tokens": tokens, "positions": positions}
    return embed(parameters["embedding"], batch, config, None, parallelism)


def _layer(
    parameters: Parameters,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    attend: Attend,
    segment_ids: jax.Array | None,
    slots: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism,
) -> tuple[jax.Array, Cache]:
    """Apply one layer to the stream of the new slots; returns it and what `attend` keeps."""
    query, key, value = project_heads(parameters, x, rotary, config, parallelism)
    mixed, cache = attend(query, Cache(key, value))
    heads = mixed.reshape(*mixed.shape[:2], -1)
    branch = linear(parameters["attention"]["output"], heads, parallelism, sharding="rows")
    x = x + post_norm(parameters, "attention_post_norm", branch, config)
    branch, _ = second_block(parameters, x, segment_ids, slots, config, parallelism)
    return x + post_norm(parameters, "feed_forward_post_norm", branch, config), cache


def _attend_to_slots(
    query: jax.Array,
    cache: Cache,
    visible: jax.Array,
    sinks: jax.Array | None,
    config: ModelConfig,
) -> jax.Array:
    """Attend with one query [B, 1, N, D] to the `visible` [B, S] of the slots [B, S, K, D].

    `sinks` [N] are scores of one more slot, which has no value.
    """
    batch, _, heads, dim = query.shape
    key, value = cache
    wide = jnp.promote_types(query.dtype, jnp.float32)
    grouped = query.reshape(batch, key.shape[2], heads // key.shape[2], dim)
    scores = jnp.einsum("bkgd,bskd->bkgs", grouped, key, preferred_element_type=wide)
    scores = soft_cap(score_scale(config) * scores, config.attn_logit_softcapping)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        of_sinks = jnp.broadcast_to(
            sinks.reshape(grouped.shape[1:3])[..., None], (*scores.shape[:3], 1)
        )
        scores = jnp.concatenate([scores, of_sinks.astype(wide)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]]
    mixed = jnp.einsum("bkgs,bskd->bkgd", weights, value, preferred_element_type=wide)
    return mixed.reshape(batch, 1, heads, -1).astype(query.dtype)


def whole_logits(
    parameters: Parameters, x: jax.Array, config: ModelConfig, parallelism: Parallelism
) -> jax.Array:
    """Compute the logits [..., V] of the stream `x` [..., H] after all layers, on every rank."""
    logits = head(parameters, x, config, parallelism)
    if parallelism.tensor > 1:
        logits = lax.all_gather(logits, "tensor", axis=x.ndim - 1, tiled=True, to="invarying")
    return logits[..., : config.vocab_size]
