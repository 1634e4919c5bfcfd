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

With `chunks` a rank's positions enter and leave in parts, so that one travels while another is
multiplied. A part inside the region has the positions of that part of every rank:

    tensor = 2, chunks = 2: rank 0 holds 0 1 2 3, rank 1 holds 4 5 6 7
      part 0 inside the region: 0 1 4 5      part 1: 2 3 6 7

The backward pass is JAX's own transposition: a value that does not vary over `tensor` has a
gradient that does not, so the cast to varying is what sums it.

Shapes: B batch, S sequence, H hidden.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.collectives.axes import collective_scope, vary_over, varying_axes
from geojax.collectives.order import in_turn
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
        return checkpoint_name(gather_positions(x), TP_COPIED)
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
        return checkpoint_name(_scatter(x), TP_REDUCED)
    with collective_scope("psum", "tensor"):
        reduced = lax.psum(x, "tensor")
    return checkpoint_name(reduced, TP_REDUCED)


def enter_in_parts(
    parts: Sequence[jax.Array], parallelism: Parallelism, *, at_once: bool
) -> tuple[jax.Array, ...]:
    """Copy parts of the stream to all ranks of `tensor`, as `copy_to_tp_region` does.

    `at_once` says that the parts are there at the same time, and is a matter of order alone.
    """
    if len(parts) == 1:
        return (copy_to_tp_region(parts[0], parallelism),)
    made = _gathers[at_once](tuple(parts))
    return tuple(checkpoint_name(each, TP_COPIED) for each in made)


def leave_in_parts(
    parts: Sequence[jax.Array], parallelism: Parallelism, *, at_once: bool
) -> tuple[jax.Array, ...]:
    """Sum parts over `tensor`, as `reduce_from_tp_region` does.

    `at_once` says that the cotangents of the results are there at the same time.
    """
    if len(parts) == 1:
        return (reduce_from_tp_region(parts[0], parallelism),)
    made = _scatters[at_once](tuple(parts))
    return tuple(checkpoint_name(each, TP_REDUCED) for each in made)


def gather_positions(x: jax.Array) -> jax.Array:
    """Gather the positions [B, S / tensor, H] of all ranks of `tensor`, to [B, S, H]."""
    with collective_scope("all_gather", "tensor"):
        return lax.all_gather(x, "tensor", axis=1, tiled=True)


def _scatter(x: jax.Array) -> jax.Array:
    with collective_scope("psum_scatter", "tensor"):
        return lax.psum_scatter(x, "tensor", scatter_dimension=1, tiled=True)


_Parts = tuple[jax.Array, ...]
_Collective = Callable[[Sequence[jax.Array]], _Parts]


def _transposed(collective: _Collective, transpose: _Collective) -> _Collective:
    """Return a collective whose derivative is another, in an order of its own."""
    made = jax.custom_vjp(collective)
    made.defvjp(
        lambda parts: (collective(parts), None), lambda _, cotangents: (transpose(cotangents),)
    )
    return made


def gather_parts(parts: Sequence[jax.Array], *, at_once: bool) -> _Parts:
    """Gather each part of the stream from all ranks of `tensor`; see `enter_in_parts`."""
    if not at_once:  # parts that come one by one are in order already
        return tuple(map(gather_positions, parts))
    return in_turn(gather_positions, parts, made_together=True)


def scatter_parts(parts: Sequence[jax.Array]) -> _Parts:
    """Sum each part over `tensor`, and scatter its positions."""
    return in_turn(_scatter, parts, made_together=False)


_gathers_of = [functools.partial(gather_parts, at_once=each) for each in (False, True)]
_gathers = [_transposed(each, scatter_parts) for each in _gathers_of]
_scatters = [_transposed(scatter_parts, each) for each in _gathers_of]


def stream_positions(x: jax.Array, parallelism: Parallelism, *, dim: int) -> jax.Array:
    """Slice the positions of this rank's residual stream out of dim `dim` of `x`.

    They are all positions; with `parallelism.sequence` the rank's contiguous 1 / tensor of them.
    """
    if not parallelism.sequence or parallelism.tensor == 1:
        return x
    size = x.shape[dim] // parallelism.tensor
    return lax.dynamic_slice_in_dim(x, lax.axis_index("tensor") * size, size, dim)


def split_stream(x: jax.Array, parallelism: Parallelism, *, dim: int = 1) -> tuple[jax.Array, ...]:
    """Split dim `dim` of the stream `x`, a rank's positions, into `parallelism.chunks` parts."""
    if parallelism.chunks == 1:
        return (x,)
    return tuple(jnp.split(x, parallelism.chunks, axis=dim))


def join_stream(parts: Sequence[jax.Array]) -> jax.Array:
    """Join the parts [B, S, H] of a stream; inverts `split_stream`."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def split_positions(x: jax.Array, parallelism: Parallelism) -> tuple[jax.Array, ...]:
    """Split all positions [B, S, ...] of a region into its parts [B, S / chunks, ...]."""
    count = parallelism.chunks
    if count == 1:
        return (x,)
    batch, positions, *rest = x.shape
    by_part = x.reshape(batch, parallelism.tensor, count, -1, *rest)
    return tuple(
        by_part[:, :, part].reshape(batch, positions // count, *rest) for part in range(count)
    )


def join_positions(parts: Sequence[jax.Array], ranks: int) -> jax.Array:
    """Join the parts of a region to all positions in their order; inverts `split_positions`.

    `ranks` is the number of ranks of `tensor`.
    """
    if len(parts) == 1:
        return parts[0]
    batch, positions, *rest = parts[0].shape
    by_rank = [each.reshape(batch, ranks, -1, *rest) for each in parts]
    return jnp.stack(by_rank, axis=2).reshape(batch, len(parts) * positions, *rest)
