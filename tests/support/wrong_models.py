"""Functions that return what cannot be trained."""

import jax.numpy as jnp
from flax import nnx
from support.own_models import WIDTH, Feed

from geojax.models import Decoder


def no_decoder(vocab_size, *, rngs):
    return nnx.Linear(WIDTH, vocab_size, rngs=rngs)


def no_blocks(vocab_size, *, rngs):
    return _with(vocab_size, [], rngs)


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.norm(x)


def batch_statistics(vocab_size, *, rngs):
    return _with(vocab_size, [Counting(rngs)], rngs)


def one_block_twice(vocab_size, *, rngs):
    return _with(vocab_size, [Feed(0.0, rngs)] * 2, rngs)


class Whole(nnx.Module):
    def __init__(self):
        self.numbers = nnx.Param(jnp.zeros(3, jnp.int32))

    def __call__(self, x):
        return x


def whole_numbers(vocab_size, *, rngs):
    return _with(vocab_size, [Whole()], rngs)


class Unlike(nnx.Module):
    def __init__(self):
        self.rates = nnx.Param(jnp.zeros(3), kind="tensor")

    def __call__(self, x):
        return x


def unknown_kind(vocab_size, *, rngs):
    return _with(vocab_size, [Unlike()], rngs)


class Flat(nnx.Module):
    def __init__(self):
        self.rates = nnx.Param(jnp.zeros(3), kind="matrix")

    def __call__(self, x):
        return x


def flat_matrix(vocab_size, *, rngs):
    return _with(vocab_size, [Flat()], rngs)


class Narrowing(nnx.Module):
    def __init__(self, rngs):
        self.narrow = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        return self.narrow(x)


def another_width(vocab_size, *, rngs):
    return _with(vocab_size, [Narrowing(rngs)], rngs)


def few_logits(vocab_size, *, rngs):
    return _with(vocab_size - 1, [Feed(0.0, rngs)], rngs)


def _with(vocab_size, blocks, rngs):
    table = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
    return Decoder(table, blocks, nnx.Linear(WIDTH, vocab_size, rngs=rngs))
