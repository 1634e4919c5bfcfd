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
from flax import nnx
from jax import lax

from geojax.models.block import Block, block_of
from geojax.models.config import ModelConfig
from geojax.models.context import ComputeSettings, LayerContext, rotary_tables
from geojax.models.declaration import Parameters
from geojax.models.embedding import Embedding, dense_layers_of, tables_of
from geojax.models.head import Head, soft_cap
from geojax.models.own.chunk import own_logits, read_by_own_head
from geojax.models.own.parts import own_parts
from geojax.models.own.settings import AnyModel, OwnModel
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism
from geojax.models.rotary import score_scale
from geojax.models.self_attention import SelfAttention
from geojax.models.transformer import final_norm, stream


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
    cache: Cache | jax.Array
    """The cache; of a model of your own the tokens of all slots so far, int32 [B, S]."""


def prefill(
    parameters: Parameters,
    tokens: jax.Array,
    padding: jax.Array,
    config: AnyModel,
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
    width = tokens.shape[1]
    if isinstance(config, OwnModel):
        texts = jnp.pad(tokens, ((0, 0), (0, slots - width)))
        return _read_again(parameters, texts, jnp.int32(width - 1), padding, config)
    prompt_slots = jnp.arange(width, dtype=jnp.int32)
    segment_ids = (prompt_slots >= padding[:, None]).astype(jnp.int32)
    positions = jnp.maximum(prompt_slots - padding[:, None], 0)
    x = _embed(parameters, tokens, positions, config, parallelism)
    tables = rotary_tables(positions, config, x.dtype)
    context = LayerContext(segment_ids, *tables, None, prompt_slots)

    def one_layer(block: Block, x: jax.Array, index: jax.Array) -> tuple[jax.Array, Cache]:
        of_layer, kept = context._replace(layer=index), []

        def attend(
            module: SelfAttention, query: jax.Array, key: jax.Array, value: jax.Array
        ) -> jax.Array:
            kept.append(Cache(key, value))
            return module.attend(query, key, value, of_layer)

        x, _ = block(x, of_layer._replace(attend=attend))
        return x, kept[0]

    x, new = _scan_layers(one_layer, x, parameters, config, parallelism)
    room = ((0, 0), (0, 0), (0, slots - width), (0, 0), (0, 0))
    cache = jax.tree.map(lambda leaf: jnp.pad(leaf, room), new)
    return Decoded(whole_logits(parameters, x[:, -1], config, parallelism), cache)


def decode(
    parameters: Parameters,
    tokens: jax.Array,
    slot: jax.Array,
    padding: jax.Array,
    cache: Cache | jax.Array,
    config: AnyModel,
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
    if isinstance(config, OwnModel):
        assert isinstance(cache, jax.Array), "the cache of a model of your own is its tokens"
        texts = lax.dynamic_update_slice_in_dim(cache, tokens[:, None], slot, axis=1)
        return _read_again(parameters, texts, slot, padding, config)
    assert isinstance(cache, Cache), "attention has a cache of keys and values"
    positions = slot - padding[:, None]
    x = _embed(parameters, tokens[:, None], positions, config, parallelism)
    context = LayerContext(None, *rotary_tables(positions, config, x.dtype), None, slot[None])
    all_slots = jnp.arange(cache.key.shape[2], dtype=jnp.int32)
    visible = (all_slots <= slot) & (all_slots >= padding[:, None])

    def one_layer(
        block: Block, carry: tuple[jax.Array, Cache], index: jax.Array
    ) -> tuple[tuple[jax.Array, Cache], None]:
        x, cache = carry
        of_layer, kept = context._replace(layer=index), []

        def attend(
            module: SelfAttention, query: jax.Array, key: jax.Array, value: jax.Array
        ) -> jax.Array:
            zero = jnp.zeros_like(index)
            start = (index, zero, slot, zero, zero)
            extended = jax.tree.map(
                lambda leaf, of_slot: lax.dynamic_update_slice(leaf, of_slot[None], start),
                cache,
                Cache(key, value),
            )
            kept.append(extended)
            seen = visible
            if config.sliding_window is not None:
                near = slot - all_slots < config.sliding_window
                windowed = module.is_windowed(of_layer)
                seen &= near if windowed is None else near | ~windowed
            own_slots = Cache(extended.key[index], extended.value[index])
            return _attend_to_slots(query, own_slots, seen, module.sink_scores, config)

        x, _ = block(x, of_layer._replace(attend=attend))
        return (x, kept[0]), None

    (x, cache), _ = _scan_layers(one_layer, (x, cache), parameters, config, parallelism)
    return Decoded(whole_logits(parameters, x[:, -1], config, parallelism), cache)


def _read_again(
    parameters: Parameters,
    texts: jax.Array,
    slot: jax.Array,
    padding: jax.Array,
    config: OwnModel,
) -> Decoded:
    """Read all tokens [B, S] of texts that end in `slot`, from the first on.

    Each text is moved to slot 0: what lies behind its end cannot change what comes before.
    """
    begun = jax.vmap(jnp.roll)(texts, -padding)
    slots = jnp.arange(texts.shape[1], dtype=jnp.int32)
    last = slot - padding
    is_text = slots <= last[:, None]
    batch = {
        "tokens": begun,
        "segment_ids": is_text.astype(jnp.int32),
        "positions": jnp.where(is_text, slots, 0),
        "row": jnp.zeros_like(padding),
    }
    x, _ = stream(parameters, batch, config)
    of_last = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return Decoded(whole_logits(parameters, of_last, config, SINGLE_DEVICE), texts)


def _scan_layers(
    one_layer: Callable[[Block, Any, jax.Array], tuple[Any, Any]],
    carry: Any,
    parameters: Parameters,
    config: ModelConfig,
    parallelism: Parallelism,
) -> tuple[Any, Any]:
    """Scan `one_layer` over first dense layers, and over all others; results are stacked.

    Its experts drop no token.
    """
    config = config.replace(capacity_factor=None)

    def scan(carry: Any, layers: Parameters, first: int, *, with_experts: bool) -> tuple[Any, Any]:
        block = block_of(config, ComputeSettings(parallelism), with_experts=with_experts)
        numbers = first + jnp.arange(len(jax.tree.leaves(layers)[0]), dtype=jnp.int32)
        return lax.scan(
            lambda carry, own: one_layer(nnx.merge(nnx.graphdef(block), own[0]), carry, own[1]),
            carry,
            (layers, numbers),
        )

    dense = config.first_k_dense_replace
    if dense:
        first = dense_layers_of(parameters["embedding"])
        carry, of_first = scan(carry, first, 0, with_experts=False)
    carry, made = scan(carry, parameters["layers"], dense, with_experts=config.is_moe)
    if dense:
        made = jax.tree.map(lambda *stacks: jnp.concatenate(stacks), of_first, made)
    return carry, made


def _embed(
    parameters: Parameters,
    tokens: jax.Array,
    positions: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism,
) -> jax.Array:
    """Embed new tokens [B, slots] as the stream [B, slots, H]."""
    graph = nnx.graphdef(Embedding(config, ComputeSettings(parallelism)))
    embedding = nnx.merge(graph, tables_of(parameters["embedding"]))
    return embedding({"tokens": tokens, "positions": positions})


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
    parameters: Parameters, x: jax.Array, config: AnyModel, parallelism: Parallelism
) -> jax.Array:
    """Compute the logits [..., V] of the stream `x` [..., H] after all layers, on every rank."""
    if isinstance(config, OwnModel):
        parts = own_parts(config)
        return own_logits(parts, read_by_own_head(parameters, parts), x[None])[0]
    head = Head.of(parameters, config, ComputeSettings(parallelism))
    logits = head(final_norm(parameters, config)(x))
    if parallelism.tensor > 1:
        logits = lax.all_gather(logits, "tensor", axis=x.ndim - 1, tiled=True, to="invarying")
    return logits[..., : config.vocab_size]
