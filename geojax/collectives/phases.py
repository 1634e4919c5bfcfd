"""The two phases of a sum of one chunk: inside a site, between sites."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import (
    AxisNames,
    axis_tuple,
    check_disjoint,
    drop_single,
    split_by_size,
    to_varying,
)
from geojax.collectives.exchange import Sum, sum_in_format
from geojax.collectives.wire_format import Wire


@dataclass(frozen=True)
class Axes:
    """`inner` and `outer` of an operation without their axes of size 1, which only change types."""

    inner: tuple[str, ...]
    outer: tuple[str, ...]
    single: tuple[str, ...]
    all_inner: tuple[str, ...]
    ranks: int
    """Over all of `inner`."""

    def drop_singles(self, leaf: jax.Array) -> jax.Array:
        """`leaf` typed as not varying over the axes of size 1."""
        return drop_single(leaf, self.single)

    def on_first_rank(self, leaf: jax.Array) -> jax.Array:
        """`leaf` on the first rank of `inner`, zeros on the others: a summand that counts once."""
        if not self.inner:
            return leaf
        return jnp.where(lax.axis_index(self.inner) == 0, leaf, jnp.zeros_like(leaf))


def resolve(inner: AxisNames, outer: AxisNames) -> Axes:
    """The axes of an operation.

    Raises:
        UserError: an axis is unknown, or named twice.
    """
    all_inner, all_outer = axis_tuple(inner), axis_tuple(outer)
    check_disjoint(all_inner, all_outer)
    long_inner, single_inner, ranks = split_by_size(all_inner)
    long_outer, single_outer, _ = split_by_size(all_outer)
    return Axes(long_inner, long_outer, single_inner + single_outer, all_inner, ranks)


def _sum_across(x: jax.Array, axes: Axes, wire: Wire | None, *, keep_error: bool) -> Sum:
    """The sum of `x` over the outer axes, of any shape."""
    if in_format(x, axes, wire):
        assert wire is not None, "numbers in a format have one"
        total, error = sum_in_format(x.reshape(x.size), axes.outer, wire)
        assert error is not None, "a sum in a format tells its error"
        return Sum(total.reshape(x.shape), error.reshape(x.shape) if keep_error else None)
    total = lax.psum(x, axes.outer) if axes.outer else x
    return Sum(total, jnp.zeros_like(x) if keep_error else None)


def in_format(x: jax.Array, axes: Axes, wire: Wire | None) -> bool:
    """Whether `x` crosses the outer axes in a wire format."""
    return bool(axes.outer) and wire is not None and jnp.issubdtype(x.dtype, jnp.floating)


def sum_to_shards(
    x: jax.Array, error: jax.Array | None, dim: int, axes: Axes, wire: Wire | None
) -> Sum:
    """The sum over inner and outer of `x`, whose `dim` divides, and to which the shards' `error` is
    added; each rank of inner keeps its block."""
    if x.size == 0:  # XLA has no collectives of empty arrays
        return Sum(jnp.zeros(_with_size(x, dim, x.shape[dim] // axes.ranks), x.dtype), error)
    if axes.inner:
        x = to_varying(x, axes.inner)
        x = lax.psum_scatter(x, axes.inner, scatter_dimension=dim, tiled=True)
    if error is not None:
        x = x + error
    return _sum_across(x, axes, wire, keep_error=error is not None)


def all_reduce_vector(vector: jax.Array, axes: Axes, wire: Wire | None, *, keep_error: bool) -> Sum:
    """The sum of a vector over inner and outer, invarying; its error invarying over inner."""
    if vector.size == 0:
        empty = jnp.zeros((0,), vector.dtype)
        return Sum(empty, empty if keep_error else None)
    if not axes.outer:
        total = lax.psum(vector, axes.inner) if axes.inner else vector
        return Sum(total, jnp.zeros_like(total) if keep_error else None)
    if not axes.inner:
        return _sum_across(vector, axes, wire, keep_error=keep_error)
    made = _sum_across(scatter_vector(vector, axes), axes, wire, keep_error=keep_error)
    return gather_vector(made, vector.size, axes)


def scatter_vector(vector: jax.Array, axes: Axes) -> jax.Array:
    """The sum of a vector over inner: each rank's block of it, padded."""
    padded = jnp.pad(vector, (0, -vector.size % axes.ranks))
    return lax.psum_scatter(
        to_varying(padded, axes.inner), axes.inner, scatter_dimension=0, tiled=True
    )


def gather_vector(made: Sum, size: int, axes: Axes) -> Sum:
    """The vector of `size` numbers, and its error, from the blocks of all ranks of inner."""

    def gather(block: jax.Array) -> jax.Array:
        return gather_shards(block, 0, axes, "invarying")[:size]

    return Sum(gather(made.total), None if made.error is None else gather(made.error))


def gather_shards(shard: jax.Array, dim: int, axes: Axes, to: str) -> jax.Array:
    """The shards of all ranks of inner, one behind the other along `dim`."""
    if shard.size == 0:
        return jnp.zeros(_with_size(shard, dim, shard.shape[dim] * axes.ranks), shard.dtype)
    if not axes.inner:
        return shard
    shard = to_varying(shard, axes.inner)
    return lax.all_gather(shard, axes.inner, axis=dim, tiled=True, to=to)


def _with_size(x: jax.Array, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])
