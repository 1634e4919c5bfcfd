"""Ring buffers: slots for the streams, cotangents and residuals that wait on a stage."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import typed_like, zeros_of
from geojax.pipeline.execution.tick_program import NOTHING


def nan_of(leaf: Any, *leading: int, zero: jax.Array | float = 0.0) -> jax.Array:
    """Make a buffer of NaN (zeros for dtypes without NaN), typed as `leaf`.

    `zero` is that of `zero_after`, which says when the buffer is made.
    """
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        zero += math.nan
    made: jax.Array = zeros_of(leaf, *leading, zero=zero)
    return made


def get(ring: jax.Array, slot: jax.Array) -> jax.Array:
    """Read a slot; any, if it is `NOTHING`."""
    return lax.dynamic_index_in_dim(
        ring, jnp.maximum(slot, 0), keepdims=False, allow_negative_indices=False
    )


def get_as(ring: jax.Array, row: jax.Array, typed: Any) -> jax.Array:
    """Read a row, in the shape of `typed`."""
    return get(ring, row).reshape(typed.shape)


def put(ring: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """Write `value` into a slot of `ring`; leave it as it is if the slot is `NOTHING`.

    A compiler updates a ring in place where all earlier reads of it are known to come first;
    otherwise it makes a copy. `held_until` makes a slot wait for them.
    """
    value = jnp.where(slot == NOTHING, get(ring, slot), value)
    return lax.dynamic_update_index_in_dim(
        ring, typed_like(value, ring), jnp.maximum(slot, 0), 0, allow_negative_indices=False
    )


def put_at(ring: jax.Array, value: jax.Array, row: jax.Array) -> jax.Array:
    """Write `value`, of any shape with as many elements, into a row of `ring`; in place."""
    value = typed_like(value.reshape(ring.shape[1:]), ring)
    return lax.dynamic_update_index_in_dim(ring, value, row, 0, allow_negative_indices=False)
