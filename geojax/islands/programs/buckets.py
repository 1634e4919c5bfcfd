"""Buckets as they cross, as shards or as messages in a wire format, and the sum of all sites'.

Every site offers the shards of its own sum to each other site. It adds all sums in the order of
sites, its own as the others decode it. All sites therefore get bit-identical totals.

Ranks that share a shard offer a part of it each (`geojax.islands.programs.shared`), and gather
the sums.

A message is of one layer of one leaf, so that the blocks of a wire format do not depend on how many
layers are in a bucket. With error feedback a site keeps what rounding took from its own messages
and adds it to the next ones.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives import WireFormat
from geojax.collectives.axes import drop_single
from geojax.collectives.wire_format import decode_sum, encode_numbers
from geojax.islands.programs.shared import whole
from geojax.sharding import LeafLayout


class EncodedBucket(NamedTuple):
    """A bucket as it crosses."""

    messages: Any
    """[layers, length] of each leaf; without a wire format the shards."""
    error_feedback: Any
    """The rounding errors, in the shapes of the state's; None: nothing is kept."""


def encode(shards: Any, error_feedback: Any, wire: WireFormat | None) -> EncodedBucket:
    """Encode the shards of a bucket, inside the site's `shard_map`.

    Args:
        shards: the site's sums, of this rank.
        error_feedback: of the step before, like the shards but for a dim of sites; None: none.
        wire: the format; None: numbers cross as they are.
    """
    if wire is None:
        return EncodedBucket(shards, None)
    own = functools.partial(encode_numbers, wire=wire)

    def one(path: Any, shard: jax.Array, error: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        if error is not None:
            # The mesh has one site: the errors' dim of sites is sharded over an axis of size 1.
            shard += drop_single(error.reshape(shard.shape), ("dc",)).astype(shard.dtype)
        made = jax.vmap(own)(shard.reshape(_layers(path, shard.shape), -1))
        shape = shard.shape if error is None else error.shape
        return made.messages, made.error.reshape(shape)

    errors = jax.tree.map(lambda _: None, shards) if error_feedback is None else error_feedback
    made = jax.tree_util.tree_map_with_path(one, shards, errors)
    messages, lost = (
        jax.tree.map(lambda _, pair, index=index: pair[index], shards, made) for index in range(2)
    )
    return EncodedBucket(messages, None if error_feedback is None else lost)


def add(parts: Sequence[Any], layouts: Any, wire: WireFormat | None, dtype: Any) -> Any:
    """Sum the messages of all sites, inside the site's `shard_map`.

    Args:
        parts: `Encoded.messages` of each site, in the order of sites, divided among the ranks that
            share them.
        layouts: the `LeafLayout` of each shard.
        wire: the format; None: numbers crossed as they are.
        dtype: dtype of the sums.
    """
    if wire is None:
        return whole(jax.tree.map(lambda *of_sites: functools.reduce(jnp.add, of_sites), *parts))

    def one(path: Any, layout: LeafLayout, *of_sites: jax.Array) -> jax.Array:
        shape = layout.shard_shape
        count = math.prod(shape) // _layers(path, shape)
        return decode_sum(of_sites, count, wire, dtype).astype(dtype).reshape(shape)

    return jax.tree_util.tree_map_with_path(one, layouts, *map(whole, parts))


def _layers(path: Any, shape: tuple[int, ...]) -> int:
    """Return the layers of a leaf at `path`; 1 where it has no dim of layers."""
    return shape[0] if path[0].key == "layers" else 1
