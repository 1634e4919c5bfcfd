"""Embedding: look-up in tables, and gradients summed in at least float32.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from geojax.collectives.axes import typed_like, vary_over, varying_axes, zero_after, zeros_of
from geojax.errors import UserError
from geojax.models.config import ModelConfig
from geojax.models.context import ON_ONE_DEVICE, ComputeSettings
from geojax.models.declaration import Parameters, normal, parameter
from geojax.models.layers import dropout
from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.sequence_order import local_positions
from geojax.models.parallel.tensor import reduce_from_tp_region, stream_positions

TOKENS, POSITIONS = "tokens", "positions"
"""The tables of an embedding, by the attributes of `Embedding`."""

DENSE_LAYERS = "dense_layers"
"""Key of the first dense layers: they lie beside the tables, since they come with them."""


class Table(nnx.Module):
    """A table of `entries` rows; `axis`: the mesh axis that shards them, or "vocabulary"."""

    def __init__(self, entries: int, config: ModelConfig, axis: str | None = None):
        shape, initial = (entries, config.hidden_size), normal(config.initializer_range)
        self.embedding = parameter(shape, initial, kind="table", axes=(axis, None))


class Embedding(nnx.Module):
    """The tables of tokens and of learned positions."""

    def __init__(self, config: ModelConfig, compute: ComputeSettings = ON_ONE_DEVICE):
        self.config, self.compute = config, compute
        self.tokens = Table(config.vocab_size, config, "vocabulary")
        if config.position_embedding_type == "learned_absolute":
            self.positions = Table(config.max_position_embeddings, config)

    def __call__(
        self,
        batch: dict[str, jax.Array],
        dropout_key: jax.Array | None = None,
        sums: Parameters | None = None,
    ) -> jax.Array:
        """Embed the tokens as the first residual stream, [B, S, H].

        With sequence parallelism the stream has 1 / tensor of the positions, here and through all
        layers. Where stages share the vocabulary, it is this stage's share of a sum over them.
        `dropout_key` holds seed and step; None: no dropout. The cotangent of `sums`, like the
        tables, is `sums` with the gradients added; None: the tables have their own.

        Raises:
            UserError: the sequence is longer than learned positions reach.
        """
        config, parallelism, tokens = self.config, self.compute.parallelism, batch["tokens"]
        own = (None, None) if sums is None else (sums[TOKENS]["embedding"], sums.get(POSITIONS))
        x = embed_tokens(self.tokens.embedding.get_value(), tokens, config, parallelism, own[0])
        if config.position_embedding_type == "learned_absolute":
            sequence = tokens.shape[1] * parallelism.context
            if sequence > config.max_position_embeddings:
                raise UserError(
                    f"a sequence of {sequence} tokens is longer than the model's "
                    f"{config.max_position_embeddings} learned positions (max_position_embeddings)"
                )
            positions = stream_positions(batch["positions"], parallelism, dim=1)
            of_positions = None if own[1] is None else own[1]["embedding"]
            x = x + look_up(self.positions.embedding.get_value(), positions, of_positions)
        if dropout_key is not None and config.dropout > 0:
            columns = local_positions(tokens.shape[1], parallelism)
            columns = stream_positions(columns, parallelism, dim=0)
            key = jax.random.fold_in(dropout_key, 0)
            x = dropout(x, key, batch["row"], columns, config.dropout)
        return x


def tables_of(embedding: Parameters) -> Parameters:
    """Return the tables of a model's part "embedding"."""
    return {name: own for name, own in embedding.items() if name != DENSE_LAYERS}


def dense_layers_of(embedding: Parameters) -> Parameters:
    """Return the first dense layers of a model's part "embedding", stacked; {} without any."""
    return {**embedding.get(DENSE_LAYERS, {})}


def look_up(table: jax.Array, indices: jax.Array, sums: jax.Array | None = None) -> jax.Array:
    """Look up rows of `table` [entries, H] at `indices` int32 [...]; returns [..., H].

    The gradient sums the uses of an entry in at least float32: a common token is used so often in a
    batch that a bfloat16 sum would stop growing. With `sums` like the table, it is the cotangent of
    these that is not zero: they themselves, with the gradient added in place.
    """
    axes = varying_axes(table, indices)
    if sums is not None:
        return _look_up_into(vary_over(table, axes), sums, vary_over(indices, axes))
    return _look_up(vary_over(table, axes), vary_over(indices, axes), table.dtype.name)


def vocab_parallel_embedding(
    table: jax.Array, tokens: jax.Array, parallelism: Parallelism, sums: jax.Array | None = None
) -> jax.Array:
    """Look up tokens in this rank's part of the vocabulary; the embedding is the sum of all parts.

    Args:
        table: [V / ranks, H], this rank's part of the table.
        tokens: int32 [...], numbers in the whole vocabulary.
        parallelism: how the model is sharded.
        sums: see `look_up`.

    Returns:
        [..., H], zero where another rank holds the token.
    """
    if parallelism.vocabulary_ranks == 1:
        return look_up(table, tokens, sums)
    own = tokens - lax.axis_index(parallelism.vocabulary_axes) * table.shape[0]
    is_local = (own >= 0) & (own < table.shape[0])
    return jnp.where(is_local[..., None], look_up(table, jnp.where(is_local, own, 0), sums), 0)


def embed_tokens(
    table: jax.Array,
    tokens: jax.Array,
    config: ModelConfig,
    parallelism: Parallelism,
    sums: jax.Array | None = None,
) -> jax.Array:
    """Embed `tokens` int32 [B, S] as the model does, [B, S, H]; `table` is this rank's part.

    With sequence parallelism the result has 1 / tensor of the positions, as the stream has. It is a
    share of the sum over stages that share the vocabulary. `sums` are those of `look_up`.
    """
    looked_up = vocab_parallel_embedding(table, tokens, parallelism, sums)
    x = reduce_from_tp_region(looked_up, parallelism)
    if config.scale_embeddings:
        x = x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype)
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(table: jax.Array, indices: jax.Array, dtype: str) -> jax.Array:
    return table[indices]


def _forward(
    table: jax.Array, indices: jax.Array, dtype: str
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return table[indices], (indices, table.shape[0])


def _backward(
    dtype: str, residuals: tuple[jax.Array, int], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    indices, entries = residuals
    cotangent, zero = zero_after(cotangent)
    wide = jnp.promote_types(cotangent.dtype, jnp.float32)
    flat = cotangent.astype(wide).reshape(-1, cotangent.shape[-1])
    total = zeros_of(flat[0], entries, zero=zero).at[indices.reshape(-1)].add(flat)
    return total.astype(dtype), None


_look_up.defvjp(_forward, _backward)


@jax.custom_vjp
def _look_up_into(table: jax.Array, sums: jax.Array, indices: jax.Array) -> jax.Array:
    return table[indices]


def _forward_into(
    table: jax.Array, sums: jax.Array, indices: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return table[indices], (table, sums, indices)


def _backward_into(
    residuals: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    table, sums, indices = residuals
    flat = cotangent.astype(sums.dtype).reshape(-1, cotangent.shape[-1])
    return zeros_of(table), typed_like(sums.at[indices.reshape(-1)].add(flat), sums), None


_look_up_into.defvjp(_forward_into, _backward_into)
