"""Predicted bytes of the model over `tensor`.

With activations of S = sequences * positions * hidden size * itemsize bytes and t ranks, a *half*
is the bytes that a reduce-scatter or an all-gather of them sends, (t - 1) / t * S, and an
all-reduce is two halves. Forward and backward of a dense model of L layers send

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

Where the backward pass is split (`geojax.models.chunk.split_backward`), the second half gathers
again over sequence-parallel ranks: the cotangents of both regions' outputs, and with remat full
their inputs. That adds 2 and 4.

A mixture of experts takes the place of the second region; its bytes are in
`geojax.planner.traffic.moe`. Gradients of weights that the ranks hold whole are not counted here.
"""

from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from geojax.hlo.conventions import all_reduce_bytes, reduce_scatter_bytes
from geojax.models.chunk.remat import Remat
from geojax.models.config import ModelConfig
from geojax.models.cross_entropy import chunk_plan
from geojax.models.parallel.parallelism import Parallelism

_RUN_AGAIN: dict[tuple[Remat, bool], int] = {
    ("none", False): 0,
    ("none", True): 0,
    ("selective", False): 0,
    ("selective", True): 2,
    ("full", False): 2,
    ("full", True): 3,
}
"""Halves that the backward pass of a layer adds, by remat policy and sequence parallelism."""


def gathers_again(remat: Remat) -> int:
    """Count what the second half of a split backward gathers again of one region."""
    return 2 if remat == "full" else 1


def predicted_tensor_bytes(
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    sequences: int,
    positions: int,
    dtype: Any,
    remat: Remat = "none",
    split_backward: bool = False,
) -> Fraction:
    """Predict the bytes over `tensor` in forward and backward of one microbatch.

    Args:
        config: the model; its experts are not counted.
        parallelism: how the mesh splits it.
        sequences: sequences of the microbatch on a device.
        positions: positions of a sequence on a device (1 / context of them).
        dtype: the compute dtype.
        remat: the rematerialization policy.
        split_backward: True where the gradients of weights come in a second half.
    """
    ranks = parallelism.tensor
    if ranks == 1:
        return Fraction(0)
    activations = sequences * positions * config.hidden_size * jnp.dtype(dtype).itemsize
    of_layer = 8 + _RUN_AGAIN[remat, parallelism.sequence]
    if split_backward and parallelism.sequence:
        of_layer += gathers_again(remat) * (1 if config.is_moe else 2)
    if config.is_moe:
        of_layer -= 5 if parallelism.sequence and remat != "none" else 4
    halves = config.num_hidden_layers * of_layer + 4
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    chunks, tokens = chunk_plan(sequences * positions, -(-config.vocab_size // ranks), wide)
    loss = all_reduce_bytes(3 * wide * chunks * tokens, ranks)
    return halves * reduce_scatter_bytes(activations, ranks) + loss
