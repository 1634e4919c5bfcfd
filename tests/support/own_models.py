"""Small models of anybody's modules, and what they compute without geojax."""

import inspect

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from geojax.models import Decoder, ModelConfig, OwnModel
from geojax.models.block import Block, ExpertBlock
from geojax.models.context import LayerContext

WIDTH = 12


class Mixer(nnx.Module):
    """Attention of one head inside a document (Flax's own computes its softmax in float32)."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        # A bias of keys moves no softmax: its gradient is rounding alone.
        biased = (True, False, True, True)
        self.products = nnx.List(
            [nnx.Linear(WIDTH, WIDTH, use_bias=bias, rngs=rngs) for bias in biased]
        )

    def __call__(self, x, context):
        query, key, value = (each(self.norm(x)) for each in self.products[:3])
        ids = context.segment_ids
        seen = jnp.tril(ids[:, :, None] == ids[:, None, :])
        scores = jnp.where(seen, jnp.einsum("bqd,bkd->bqk", query, key), -1e9)
        return x + self.products[3](jax.nn.softmax(scores) @ value)


class Feed(nnx.Module):
    """A layer that is called with the stream alone."""

    def __init__(self, rate, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


class TiedHead(nnx.Module):
    """The embedding's table, transposed, and a scale of its own."""

    def __init__(self, table, rngs):
        self.table, self.norm = table.embedding, nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(x) @ self.table[...].T


def build(vocab_size, layers=4, rate=0.0, tied=False, *, rngs):
    """Every second layer is another."""
    table = nnx.Embed(vocab_size, WIDTH, param_dtype=jnp.float64, rngs=rngs)
    blocks = [Mixer(rngs) if each % 2 == 0 else Feed(rate, rngs) for each in range(layers)]
    head = TiedHead(table, rngs) if tied else nnx.Linear(WIDTH, vocab_size, rngs=rngs)
    return Decoder(table, blocks, head)


class LinenLayer(linen.Module):
    """A layer in Linen, without a word about nnx."""

    rate: float

    @linen.compact
    def __call__(self, x, mask, deterministic):
        normed = linen.LayerNorm()(x)
        x = x + linen.SelfAttention(num_heads=3, deterministic=deterministic)(normed, mask=mask)
        hidden = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dropout(self.rate, deterministic=deterministic)(linen.Dense(WIDTH)(hidden))


class Bridged(nnx.Module):
    """It, through Flax's bridge."""

    def __init__(self, rate, rngs):
        x = jnp.zeros((1, 4, WIDTH))
        mask = jnp.ones((1, 1, 4, 4), bool)
        layer = nnx.bridge.ToNNX(LinenLayer(rate), rngs=rngs)
        self.layer = nnx.bridge.lazy_init(layer, x, mask, True)

    def __call__(self, x, context):
        ids = context.segment_ids
        same = linen.make_attention_mask(ids, ids, jnp.equal)
        mask = linen.combine_masks(same, linen.make_causal_mask(ids))
        return self.layer(x, mask, context.key is None)


def build_linen(vocab_size, rate=0.0, *, rngs):
    """Three layers of Linen."""
    table = nnx.Embed(vocab_size, WIDTH, param_dtype=jnp.float64, rngs=rngs)
    blocks = [Bridged(rate, rngs) for _ in range(3)]
    return Decoder(table, blocks, nnx.Linear(WIDTH, vocab_size, rngs=rngs))


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "router_aux_loss_coef": 0.3}


class PartsLayer(nnx.Module):
    """A layer of geojax's, which ranks of `tensor` and `context` share."""

    supports = frozenset({"tensor", "context"})

    def __init__(self, config, compute):
        self.block = Block(config, compute)

    def __call__(self, x, context):
        return self.block(x, context)[0]


def parts_config(vocab_size, layers=2, experts=0, keys=1, lora=None):
    """The settings of the layers of geojax."""
    return ModelConfig(
        num_hidden_layers=layers,
        hidden_size=WIDTH,
        num_attention_heads=2,
        num_key_value_heads=keys,
        intermediate_size=20,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        lora=lora,
        **_EXPERTS | {"num_experts": experts} if experts else {},
    )


def build_of_parts(
    vocab_size, layers=2, experts=0, wrapped=False, keys=1, lora=None, *, rngs, compute
):
    """Layers of geojax between an embedding and a head of Flax; every second one with experts."""
    config = parts_config(vocab_size, layers, experts, keys, lora)
    table = nnx.Embed(vocab_size, WIDTH, param_dtype=jnp.float64, rngs=rngs)
    second = ExpertBlock if experts else Block
    kinds = [PartsLayer] * 2 if wrapped else [Block, second]
    blocks = [kinds[number % 2](config, compute) for number in range(layers)]
    return Decoder(table, blocks, nnx.Linear(WIDTH, vocab_size, rngs=rngs))


MODELS = {
    "pattern": {"module": "support.own_models:build"},
    "tied": {"module": "support.own_models:build", "tied": True},
    "linen": {"module": "support.own_models:build_linen"},
}


def own_model(name, **arguments):
    return OwnModel(**MODELS[name], vocab_size=29, max_position_embeddings=64, **arguments)


def plain_loss(model, parameters, batch):
    """The mean loss by calling the modules themselves, one after the other."""
    decoder = model.function(**model.arguments, rngs=nnx.Rngs(0))
    size = len(decoder.blocks) // len(jax.tree.leaves(parameters["layers"])[0])
    _fill(decoder.embedding, parameters["embedding"])
    for number, block in enumerate(decoder.blocks):
        of_place = parameters["layers"][str(number % size)] if size > 1 else parameters["layers"]
        _fill(block, jax.tree.map(lambda leaf, at=number // size: leaf[at], of_place))
    _fill(decoder.head, parameters["head"])  # a tied table is the embedding's, and filled
    positions = jnp.arange(batch["tokens"].shape[1])
    context = LayerContext(batch["segment_ids"], None, None, None, positions, batch["positions"])
    x = _called(decoder.embedding, batch["tokens"], context)
    for block in decoder.blocks:
        x = _called(block, x, context)
    losses = optax.softmax_cross_entropy_with_integer_labels(decoder.head(x), batch["targets"])
    return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()


def _called(module, x, context):
    takes_context = "context" in inspect.signature(type(module).__call__).parameters
    return module(x, context) if takes_context else module(x)


def _fill(module, values):
    flat = {tuple(map(str, path)): each for path, each in nnx.to_flat_state(nnx.state(module))}
    for path, value in _leaves(values):
        flat[path].set_value(value)
    nnx.update(module, nnx.state(module))


def _leaves(tree, above=()):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


class Rated(nnx.Module):
    """A block with a matrix that is no `kernel`, and a kernel that is no matrix."""

    def __init__(self, rngs):
        self.rates = nnx.Param(jnp.zeros((WIDTH, WIDTH)), kind="matrix")
        self.filter = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.filter.kernel.set_metadata(kind="vector")

    def __call__(self, x):
        return x + self.filter(x @ self.rates[...])


def rated(vocab_size, *, rngs):
    table = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
    return Decoder(table, [Rated(rngs)], nnx.Linear(WIDTH, vocab_size, rngs=rngs))
