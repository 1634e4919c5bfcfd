"""Rings of slots: what waits on a stage of a pipeline."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.parallel.varying import vary_over, varying_axes, zeros_of
from geojax.pipeline.execution.tick_program import NOTHING


def nan_of(leaf: Any, *leading: int) -> jax.Array:
    """A buffer of NaN (of what has none, zeros), typed as `leaf`."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return zeros_of(leaf, *leading)
    full = jnp.full((*leading, *leaf.shape), math.nan, leaf.dtype)
    return vary_over(full, varying_axes(leaf))


def typed_like(x: jax.Array, typed: Any) -> jax.Array:
    """`x` varying over whatever `typed` varies over."""
    more = varying_axes(x) - varying_axes(typed)
    assert not more, f"varies over {sorted(more)} too"
    return vary_over(x, varying_axes(typed))


def get(ring: jax.Array, slot: jax.Array) -> jax.Array:
    """What lies in a slot; in any, if it is `NOTHING`."""
    return lax.dynamic_index_in_dim(
        ring, jnp.maximum(slot, 0), keepdims=False, allow_negative_indices=False
    )


def get_layer(ring: jax.Array, slot: jax.Array, index: jax.Array) -> jax.Array:
    """What lies in a slot [slots, layers, ...] of one layer."""
    zero = jnp.int32(0)
    start = (slot, index, *[zero] * (ring.ndim - 2))
    sizes = (1, 1, *ring.shape[2:])
    return lax.dynamic_slice(ring, start, sizes, allow_negative_indices=False)[0, 0]


def put(ring: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
    """`ring` with `value` in a slot; as it was where there is none."""
    value = jnp.where(slot == NOTHING, get(ring, slot), value)
    return lax.dynamic_update_index_in_dim(
        ring, typed_like(value, ring), jnp.maximum(slot, 0), 0, allow_negative_indices=False
    )


def put_layer(ring: jax.Array, value: jax.Array, slot: jax.Array, index: jax.Array) -> jax.Array:
    """`ring` [slots, layers, ...] with `value` as what one layer has in a slot; in place."""
    start = (slot, index, *[jnp.int32(0)] * value.ndim)
    value = typed_like(value, ring)[None, None]
    return lax.dynamic_update_slice(ring, value, start, allow_negative_indices=False)


def behind(slot: jax.Array, token: jax.Array) -> jax.Array:
    """`slot`, known when `token` is, so that what is put there waits for it.

    A compiler updates a ring in place where all that reads it before is known to come first;
    otherwise it makes a copy.
    """
    number = jnp.nan_to_num(token.ravel()[0])
    return jnp.where(jnp.isnan(number), NOTHING, slot)  # it never is, but who knows that?
