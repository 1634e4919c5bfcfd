"""A model of your own in Flax's nnx: layers of a convolution and of a state space.

Every third layer mixes positions by a causal convolution, the others by a linear recurrence with a
decay for each channel (Gu and Dao 2023, "Mamba", without its selection). Train it over two sites on
any machine: geojax train examples/state_space.yaml
"""

import jax
import jax.numpy as jnp
from flax import nnx

from geojax.models import Decoder


class Table(nnx.Module):
    def __init__(self, tokens, width, rngs):
        self.rows = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, width)))

    def __call__(self, tokens):
        return self.rows[tokens]


class Recurrence(nnx.Module):
    def __init__(self, width, rngs):
        self.decay = nnx.Param(jax.random.uniform(rngs.params(), (width,), minval=0.0, maxval=4.0))
        self.gate = nnx.Linear(width, width, rngs=rngs)
        self.output = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x, context):
        kept = jnp.broadcast_to(nnx.sigmoid(self.decay[...]), x.shape)
        # A document begins with an empty state.
        kept = jnp.where(context.positions[..., None] == 0, 0, kept)

        def join(before, after):
            return before[0] * after[0], after[0] * before[1] + after[1]

        _, states = jax.lax.associative_scan(join, (kept, (1 - kept) * x), axis=1)
        return self.output(states * nnx.silu(self.gate(x)))


class Convolution(nnx.Module):
    def __init__(self, width, rngs):
        self.mix = nnx.Conv(width, width, kernel_size=(4,), padding="CAUSAL", rngs=rngs)

    def __call__(self, x, context):
        return nnx.silu(self.mix(x))


class Layer(nnx.Module):
    def __init__(self, mixer, width, dropout, rngs):
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.mixer = mixer(width, rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, context):
        x = x + self.mixer(self.norms[0](x), context)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


def build(vocab_size, width=128, layers=6, dropout=0.0, *, rngs):
    mixers = [Convolution if number % 3 == 0 else Recurrence for number in range(layers)]
    return Decoder(
        Table(vocab_size, width, rngs),
        [Layer(mixer, width, dropout, rngs) for mixer in mixers],
        nnx.Sequential(nnx.RMSNorm(width, rngs=rngs), nnx.Linear(width, vocab_size, rngs=rngs)),
    )
