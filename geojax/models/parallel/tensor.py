"""Where the residual stream enters and leaves the matrix products that several ranks share.

Between `enter` and `leave` each rank of `tensor` works on its own heads, its own part of the
feed-forward width or its own part of the vocabulary, for every column of the row. Outside, it works
on the residual stream. `enter` and `leave` are the conjugate operators f and g of Shoeybi et al.
2019 ("Megatron-LM", section 3) and, with sequence parallelism, g and its conjugate of Korthikanti
et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4.2.2):

                        forward             backward
    enter               nothing             all-reduce
    leave               all-reduce          nothing
    enter, sequence     all-gather          reduce-scatter
    leave, sequence     reduce-scatter      all-gather

    stream, tensor = 2                  whole on both ranks        with `sequence`
      rank 0: columns                   0 1 2 3                    0 1
      rank 1: columns                   0 1 2 3                    2 3

An all-reduce sends what a reduce-scatter and an all-gather send, so that sequence parallelism costs
no byte: for a stream of S = rows * columns * hidden * itemsize bytes and t ranks, forward and
backward of a block, which enters once and leaves once, send 4 (t - 1) / t S (`tensor_traffic` has
the whole model's bytes). Sums are in the dtype of the stream, as Megatron's are.

The backward pass is JAX's own transposition: a value that does not vary over `tensor` has a
gradient that does not, so the cast to varying is what sums it.
"""

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.models.parallel.parallelism import Parallelism
from geojax.models.parallel.varying import vary_over, varying_axes

ENTERED = "tensor_parallel_entered"
LEFT = "tensor_parallel_left"
"""Names of what the two operators' collectives return, for rematerialisation policies."""


def enter(x: jax.Array, parallelism: Parallelism) -> jax.Array:
    """The stream `x` [rows, columns, hidden] as every rank of `tensor` reads it: all columns.

    Call it once for all products that read the same `x`, so that their gradients are summed before
    they are sent.

    Args:
        x: the stream; with `parallelism.sequence` columns / tensor of it.
        parallelism: how the model is spread.

    Returns:
        [rows, columns, hidden], varying over `tensor`.
    """
    if parallelism.tensor == 1:
        return x
    if parallelism.sequence:
        return checkpoint_name(lax.all_gather(x, "tensor", axis=1, tiled=True), ENTERED)
    assert "tensor" not in varying_axes(x), "without sequence parallelism the stream is whole"
    return vary_over(x, frozenset({"tensor"}))


def leave(x: jax.Array, parallelism: Parallelism) -> jax.Array:
    """The stream that the ranks' `x` [rows, columns, hidden] add up to.

    Args:
        x: what this rank's part of the weights contributes to every column.
        parallelism: how the model is spread.

    Returns:
        The sum over `tensor`: [rows, columns, hidden], the same on all of its ranks; with
        `parallelism.sequence` this rank's [rows, columns / tensor, hidden].
    """
    if parallelism.tensor == 1:
        return x
    if parallelism.sequence:
        return checkpoint_name(lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True), LEFT)
    return checkpoint_name(lax.psum(x, "tensor"), LEFT)


def stream_columns(x: jax.Array, parallelism: Parallelism, *, dim: int) -> jax.Array:
    """What of `x`, whose dim `dim` is the columns, belongs to this rank's residual stream.

    That is all of it; with `parallelism.sequence` the rank's contiguous 1 / tensor.
    """
    if not parallelism.sequence or parallelism.tensor == 1:
        return x
    size = x.shape[dim] // parallelism.tensor
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)
