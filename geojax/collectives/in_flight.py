"""An all-reduce whose phases are its caller's to place, with something else computed in between.

    flight = start_all_reduce(tree, ...)    sums in the site and encodes: the messages
    flight = flight.cross()                 the collective over `outer`, of nothing but messages
    total, errors = flight.finish()         decodes, and gathers in the site

A loop that computes something else carries a flight from turn to turn: its turn begins with `cross`
of the flight that the last turn has started. Then nothing of the turn waits for the messages, and
neither what is sent nor what comes shares memory with what is computed. (XLA's runtime for CPUs
needs that: it lets operations wait for each other that use the same temporary memory one behind the
other, though no data flow between them.)
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives import exchange
from geojax.collectives.axes import AxisNames
from geojax.collectives.exchange import Message, Sum
from geojax.collectives.hierarchical import FlatTree, flatten
from geojax.collectives.phases import (
    Axes,
    all_reduce_vector,
    gather_vector,
    in_format,
    resolve,
    scatter_vector,
)
from geojax.collectives.wire_format import Wire

Sent: TypeAlias = Message | jax.Array | Sum
"""A chunk: in a wire format; as it is; or not at all, since no other site has a part of it."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["chunks"],
    meta_fields=["sizes", "flat", "axes", "wire", "keep_errors"],
)
@dataclass(frozen=True)
class AllReduce:
    """A sum over all ranks of `inner` and `outer` that has begun; a pytree."""

    chunks: tuple[Sent, ...]
    sizes: tuple[int, ...]
    """Of the chunks, in numbers."""
    flat: FlatTree
    axes: Axes
    wire: Wire | None
    keep_errors: bool

    def cross(self) -> "AllReduce":
        """The one phase that others have a part in: what all sites have started."""
        return dataclasses.replace(self, chunks=tuple(map(self._cross, self.chunks)))

    def finish(self) -> tuple[Any, Any]:
        """What `all_reduce_with_errors` returns, of what has crossed."""
        return self.flat.join(list(map(self._finish, self.chunks, self.sizes)))

    def _cross(self, chunk: Sent) -> Sent:
        if isinstance(chunk, Sum):
            return chunk
        if isinstance(chunk, Message):
            assert self.wire is not None, "a message has a format"
            return exchange.cross(chunk, self.axes.outer, self.wire)
        return lax.psum(chunk, self.axes.outer)

    def _finish(self, chunk: Sent, size: int) -> Sum:
        if isinstance(chunk, Sum):
            return chunk
        if isinstance(chunk, Message):
            assert self.wire is not None, "a message has a format"
            made = exchange.arrive(chunk, self.axes.outer, self.wire)
        else:
            made = Sum(chunk, jnp.zeros_like(chunk) if self.keep_errors else None)
        return gather_vector(made, size, self.axes) if self.axes.inner else made


def start_all_reduce(
    tree: Any,
    errors: Any,
    inner: AxisNames,
    outer: AxisNames,
    *,
    chunk_bytes: int | None = None,
    wire: Wire | None = None,
) -> AllReduce:
    """The first phase of `all_reduce_with_errors`, which has the same arguments.

    Unlike that it has no derivative where there is a wire format.

    Raises:
        UserError: as that does.
    """
    axes = resolve(inner, outer)
    flat, vectors = flatten(tree, errors, axes, chunk_bytes)
    keep = errors is not None

    def start(vector: jax.Array) -> Sent:
        if vector.size == 0 or not axes.outer:
            return all_reduce_vector(vector, axes, wire, keep_error=keep)
        shard = scatter_vector(vector, axes) if axes.inner else vector
        if not in_format(shard, axes, wire):
            return shard
        assert wire is not None, "numbers in a format have one"
        return exchange.depart(shard, axes.outer, wire, keep_error=keep)

    sizes = tuple(vector.size for vector in vectors)
    return AllReduce(tuple(map(start, vectors)), sizes, flat, axes, wire, keep)
