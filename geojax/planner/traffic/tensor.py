"""Predicted bytes of the model over `tensor`.

With activations of S = sequences * positions * width * itemsize bytes and t ranks, a *half* is the
bytes that a reduce-scatter or an all-gather of them sends, (t - 1) / t * S, and an all-reduce is
two halves. The width is the hidden size; what enters the first region of a layer with latent
attention are its latents. Forward and backward of a dense model of L layers send

    each layer                          8 halves     copy to and reduce from the region, twice
    embedding                           2            reduce
    head                                2            copy
    loss                                             three numbers a token, all-reduced

with sequence parallelism and without. The backward pass of a layer sends more where it runs a part
of the forward pass again (see `geojax.models.chunk.remat`):

                  plain                           with sequence parallelism
    none          nothing                         nothing
    selective     nothing                         2: the inputs are gathered again
    full          2: the output of attention      3: both
                  and with sandwich_norm, that of the feed-forward block too: 2, or 1 more

A mixture of experts takes the place of the second region, and is not counted here. First dense
layers run as with remat full. A module for later tokens sends what a layer with remat full, an
embedding and a head with its loss do. Gradients of weights that the ranks hold whole are not
counted here, nor what the second half of a split backward gathers again.
"""

from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp

from geojax.hlo.conventions import all_reduce_bytes, reduce_scatter_bytes
from geojax.models import ModelConfig
from geojax.models.chunk.remat import Remat
from geojax.models.head import chunk_plan
from geojax.models.parallel.parallelism import Parallelism


class Halves(NamedTuple):
    """Halves that forward and backward of one layer send, by what travels."""

    entering_attention: int = 0
    """The input of the first region, or its latents."""
    stream: int = 0
    """The outputs of both regions, and the input of the second one."""

    def plus(self, entering_attention: int, stream: int) -> "Halves":
        """Return the sum of both and these."""
        return Halves(self.entering_attention + entering_attention, self.stream + stream)


def layer_halves(
    remat: Remat,
    *,
    sequence: bool,
    with_experts: bool = False,
    sandwich_norm: bool = False,
) -> Halves:
    """Count the halves of one layer, without those of its experts."""
    halves = Halves(2, 2 if with_experts else 6)
    if sequence and remat != "none":
        halves = halves.plus(1, 0 if with_experts else 1)
    if remat == "full":
        halves = halves.plus(0, (1 if sequence else 2) * (2 if sandwich_norm else 1))
    return halves


def predicted_tensor_bytes(
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    sequences: int,
    positions: int,
    dtype: Any,
    remat: Remat = "none",
) -> Fraction:
    """Predict the bytes over `tensor` in forward and backward of one microbatch.

    Args:
        config: the model; its experts are not counted.
        parallelism: how the mesh splits it.
        sequences: sequences of the microbatch on a device.
        positions: positions of a sequence on a device (1 / context of them).
        dtype: the compute dtype.
        remat: the rematerialization policy.
    """
    ranks = parallelism.tensor
    if ranks == 1:
        return Fraction(0)
    halves = layer_halves(
        remat,
        sequence=parallelism.sequence,
        with_experts=config.is_moe,
        sandwich_norm=config.sandwich_norm,
    )
    layers = config.num_stacked_layers
    sent = Halves(layers * halves.entering_attention, layers * halves.stream + 4)
    if dense := config.first_k_dense_replace:
        full = layer_halves("full", sequence=parallelism.sequence)
        sent = sent.plus(dense * full.entering_attention, dense * full.stream)
    # The layer of a module for later tokens runs again; it has an embedding and a head of its own.
    modules = config.num_nextn_predict_layers
    full = layer_halves(
        "full",
        sequence=parallelism.sequence,
        with_experts=config.is_moe,
        sandwich_norm=config.sandwich_norm,
    )
    sent = sent.plus(modules * full.entering_attention, modules * (full.stream + 4))
    numbers = sequences * positions * jnp.dtype(dtype).itemsize
    entering = numbers * config.projected_width
    regions = sent.entering_attention * reduce_scatter_bytes(entering, ranks)
    regions += sent.stream * reduce_scatter_bytes(numbers * config.hidden_size, ranks)
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    chunks, tokens = chunk_plan(sequences * positions, -(-config.vocab_size // ranks), wide)
    loss = all_reduce_bytes(3 * wide * chunks * tokens, ranks)
    return regions + (1 + modules) * loss
