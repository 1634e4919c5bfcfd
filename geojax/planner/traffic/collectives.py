"""Predicted bytes of the hierarchical sum.

It follows the same bucket plans and the same convention (`geojax.hlo.conventions`) as the
operation, padding included. For a tree of S bytes that divides evenly, with r ranks inside a site
and o sites, a device sends

    inside 2 (r - 1) / r * S       across 2 (o - 1) / o * S / r

In a wire format a device sends across 2 (o - 1) times the message of each bucket's n / (r o)
numbers; with two sites, the message of its n / r numbers.
"""

from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from geojax.collectives.buckets import plan_elements, share_length
from geojax.collectives.like_trees import PyTree
from geojax.collectives.wire_format import WireFormat, block_of, part_length
from geojax.hlo.conventions import (
    all_gather_bytes,
    all_reduce_bytes,
    all_to_all_bytes,
    permute_bytes,
    reduce_scatter_bytes,
)


@dataclass(frozen=True)
class PhaseBytes:
    """The bytes that one device sends in the two phases of a hierarchical collective."""

    intra: Fraction
    """The bytes sent inside its site."""
    messages: tuple[Fraction, ...] = ()
    """The bytes of the sum over sites of each bucket."""
    sizes: tuple[int, ...] = ()
    """The bytes of each such bucket in a site, all ranks together, in the leaf's dtype."""

    @property
    def inter(self) -> Fraction:
        """The bytes sent to other sites."""
        return sum(self.messages, Fraction(0))


def predicted_all_reduce(
    tree: PyTree,
    *,
    intra_ranks: int,
    inter_ranks: int,
    bucket_bytes: int | None = None,
    wire: WireFormat | None = None,
    errors: bool = False,
) -> PhaseBytes:
    """Predict what `all_reduce` sends; the leaves need only a shape and a dtype.

    The leaves are taken to vary over the same axes, as gradients do. With `errors`, error feedback
    gathers once more inside the site.
    """
    leaves = jax.tree.leaves(tree)
    dtypes = [leaf.dtype for leaf in leaves]
    plan = plan_elements(
        [int(np.prod(leaf.shape)) for leaf in leaves],
        dtypes,
        dtypes,
        intra_ranks,
        bucket_bytes,
        block_of(wire),
    )
    intra, messages, sizes = Fraction(0), [], []
    for bucket in plan.buckets:
        dtype = np.dtype(dtypes[bucket.pieces[0].leaf])
        size = dtype.itemsize
        if inter_ranks == 1:
            intra += all_reduce_bytes(bucket.length * size, intra_ranks)
            continue
        shard = share_length(bucket.length, intra_ranks, block_of(wire))
        intra += reduce_scatter_bytes(shard * intra_ranks * size, intra_ranks)
        messages.append(_across(shard, dtype, inter_ranks, wire))
        sizes.append(intra_ranks * shard * size)
        intra += (2 if errors else 1) * all_gather_bytes(shard * size, intra_ranks)
    return PhaseBytes(intra, tuple(messages), tuple(sizes))


def _across(count: int, dtype: np.dtype, sites: int, wire: WireFormat | None) -> Fraction:
    """Predict what the sum of `count` numbers over sites sends."""
    if wire is None or not jnp.issubdtype(dtype, jnp.floating):
        return all_reduce_bytes(count * dtype.itemsize, sites)
    if sites == 2:
        return permute_bytes(wire.message_bytes(count), sites)
    message = wire.message_bytes(part_length(count, sites, wire))
    return all_to_all_bytes(sites * message, sites) + all_gather_bytes(message, sites)
