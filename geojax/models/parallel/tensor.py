"""Conjugate operators at the borders of a tensor-parallel region.

Between `copy_to_tp_region` and `reduce_from_tp_region` each rank of `tensor` works on its own
heads, its own part of the feed-forward width or its own part of the vocabulary, for every position
of the sequence. Outside, it works on the residual stream. They are the conjugate operators f and g
of Shoeybi et al. 2019 ("Megatron-LM", section 3) and, with sequence parallelism, g and its
conjugate of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models", section 4.2.2):

                                        forward             backward
    copy_to_tp_region                   nothing             all-reduce
    reduce_from_tp_region               all-reduce          nothing
    copy_to_tp_region, sequence         all-gather          reduce-scatter
    reduce_from_tp_region, sequence     reduce-scatter      all-gather

    residual stream, tensor = 2       without `sequence`      with `sequence`
      rank 0: positions               0 1 2 3                 0 1
      rank 1: positions               0 1 2 3                 2 3

An all-reduce sends as much as a reduce-scatter and an all-gather, so sequence parallelism costs no
byte. A block enters and leaves the region once. With a stream of n = B * S * H * itemsize bytes and
t ranks, its forward and backward send 4 (t - 1) / t n. Sums are in the dtype of the stream, as
Megatron's are.

The backward pass is JAX's own transposition: a value that does not vary over `tensor` has a
gradient that does not, so the cast to varying is what sums it.

Shapes: B batch, S sequence, H hidden.
"""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.collectives.axes import vary_over, varying_axes
from geojax.models.parallel.parallelism import Parallelism

TP_COPIED = "tensor_parallel_entered"
TP_REDUCED = "tensor_parallel_left"
"""Names of the results of the two operators' collectives, for rematerialization policies."""


def copy_to_tp_region(x: jax.Array, parallelism: Parallelism) -> jax.Array:
    """Copy the residual stream to all ranks of `tensor`, every position of it.

    Call it once for all matmuls that read the same `x`, so that their gradients are summed before
    they are sent.

    Args:
        x: [B, S, H], the stream; with `parallelism.sequence` [B, S / tensor, H].
        parallelism: how the model is sharded.

    Returns:
        [B, S, H], varying over `tensor`.
    """
    if parallelism.tensor == 1:
        return x
    if parallelism.sequence:
        return checkpoint_name(lax.all_gather(x, "tensor", axis=1, tiled=True), TP_COPIED)
    assert "tensor" not in varying_axes(x), "without sequence parallelism the stream is unsharded"
    return vary_over(x, frozenset({"tensor"}))


def reduce_from_tp_region(x: jax.Array, parallelism: Parallelism) -> jax.Array:
    """Sum over `tensor` what the ranks' parts of the weights contribute.

    Args:
        x: [B, S, H], this rank's contribution to every position.
        parallelism: how the model is sharded.

    Returns:
        [B, S, H], the same on all ranks of `tensor`; with `parallelism.sequence` this rank's
        [B, S / tensor, H].
    """
    if parallelism.tensor == 1:
        return x
    if parallelism.sequence:
        reduced = lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)
        return checkpoint_name(reduced, TP_REDUCED)
    return checkpoint_name(lax.psum(x, "tensor"), TP_REDUCED)


def stream_positions(x: jax.Array, parallelism: Parallelism, *, dim: int) -> jax.Array:
    """Slice the positions of this rank's residual stream out of dim `dim` of `x`.

    They are all positions; with `parallelism.sequence` the rank's contiguous 1 / tensor of them.
    """
    if not parallelism.sequence or parallelism.tensor == 1:
        return x
    size = x.shape[dim] // parallelism.tensor
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)
