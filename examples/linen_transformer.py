"""A transformer of your own in Linen, through Flax's bridge.

Its layers are written with Flax's own, and know nothing of geojax. Train it over two sites on any
machine: geojax train examples/linen_transformer.yaml
"""

import flax.linen as nn
import jax.numpy as jnp
from flax.nnx import Module, Rngs, bridge

from geojax.models import Decoder


class Layer(nn.Module):
    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, mask, deterministic):  # [batch, sequence, width] -> the same
        attention = nn.SelfAttention(self.heads, deterministic=deterministic)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        hidden = nn.Dense(x.shape[-1])(hidden)
        return x + nn.Dropout(self.dropout)(hidden, deterministic=deterministic)


class Tables(nn.Module):
    tokens: int
    positions: int
    width: int

    @nn.compact
    def __call__(self, tokens, positions):
        of_positions = nn.Embed(self.positions, self.width)(positions)
        return nn.Embed(self.tokens, self.width)(tokens) + of_positions


class Head(nn.Module):
    tokens: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.tokens)(nn.LayerNorm()(x))


class Block(Module):
    def __init__(self, layer, width, rngs):
        x, mask = jnp.zeros((1, 2, width)), jnp.ones((1, 1, 2, 2))
        self.layer = bridge.lazy_init(bridge.ToNNX(layer, rngs=rngs), x, mask, True)

    def __call__(self, x, context):
        documents = context.segment_ids
        inside = nn.make_attention_mask(documents, documents, jnp.equal)
        mask = nn.combine_masks(inside, nn.make_causal_mask(documents))
        return self.layer(x, mask, context.key is None)


class Embedding(Module):
    def __init__(self, tables, rngs):
        tokens = jnp.zeros((1, 2), jnp.int32)
        self.tables = bridge.lazy_init(bridge.ToNNX(tables, rngs=rngs), tokens, tokens)

    def __call__(self, tokens, context):
        return self.tables(tokens, context.positions)


def build(
    vocab_size,
    max_position_embeddings=128,
    width=128,
    layers=4,
    heads=4,
    dropout=0.0,
    *,
    rngs: Rngs,
):
    head = bridge.ToNNX(Head(vocab_size), rngs=rngs)
    return Decoder(
        Embedding(Tables(vocab_size, max_position_embeddings, width), rngs),
        [Block(Layer(heads, dropout), width, rngs) for _ in range(layers)],
        bridge.lazy_init(head, jnp.zeros((1, 2, width))),
    )
