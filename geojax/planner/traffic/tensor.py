"""What the model sends over `tensor`, by formula: to compare with what a program holds.

A stream of S = rows * columns * hidden * itemsize bytes and t ranks; a *half* is what a
reduce-scatter or an all-gather of the stream sends, (t - 1) / t * S bytes, and an all-reduce is two
halves. Forward and backward of a dense model of L layers send

    each layer                          8 halves     enter and leave, twice
    embedding                           2            leave
    head                                2            enter
    loss                                             three numbers a token, all-reduced

with sequence parallelism and without. The backward pass of a layer sends more where it runs a part
of the forward pass again (see `geojax.models.chunk.remat`):

                  whole stream                    with sequence parallelism
    none          nothing                         nothing
    selective     nothing                         2: what entered is gathered again
    full          2: what left attention          3: both

A mixture of experts takes the place of the second entering and leaving, and sends what
`geojax.planner.traffic.moe` says. Gradients of weights that the ranks hold whole are not counted
here.
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
"""Halves that the backward pass of a layer adds, by policy and whether the stream is shared."""


def expected_tensor_bytes(
    config: ModelConfig,
    parallelism: Parallelism,
    *,
    rows: int,
    columns: int,
    dtype: Any,
    remat: Remat = "none",
) -> Fraction:
    """What one device sends over `tensor` in forward and backward of one microbatch.

    Args:
        config: the model; the mixtures in its layers are not counted.
        parallelism: how it is spread.
        rows: of the microbatch on a device.
        columns: of a row, on a device (1 / context of them).
        dtype: that the model computes in.
        remat: what the forward pass keeps.
    """
    ranks = parallelism.tensor
    if ranks == 1:
        return Fraction(0)
    stream = rows * columns * config.hidden_size * jnp.dtype(dtype).itemsize
    of_layer = 8 + _RUN_AGAIN[remat, parallelism.sequence]
    if config.is_moe:
        of_layer -= 5 if parallelism.sequence and remat != "none" else 4
    halves = config.num_hidden_layers * of_layer + 4
    wide = jnp.promote_types(dtype, jnp.float32).itemsize
    chunks, tokens = chunk_plan(rows * columns, -(-config.vocab_size // ranks), wide)
    loss = all_reduce_bytes(3 * wide * chunks * tokens, ranks)
    return halves * reduce_scatter_bytes(stream, ranks) + loss
