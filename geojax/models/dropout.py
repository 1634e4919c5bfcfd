"""Dropout with masks that depend on the element and not on the device that computes it.

Element i of the residual stream is dropped by a hash of the key (which holds seed, step, layer and
which dropout), the sequence's index in the global batch, the position in the sequence, and i. Every
layout therefore draws the same masks, and nothing is stored for the backward pass that could not be
computed again.
"""

import jax
import jax.numpy as jnp

# Odd constants that spread consecutive indices over 32 bits: the golden ratio, and two primes.
_ROW, _COLUMN, _ELEMENT = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


def dropout(
    x: jax.Array,
    key: jax.Array | None,
    sequence_indices: jax.Array | None,
    positions: jax.Array,
    rate: float,
) -> jax.Array:
    """Zero a share `rate` of `x` [B, S, H] and scale up the rest.

    Args:
        x: the activations.
        key: a JAX key that holds seed, step, layer and which dropout this is; None drops nothing.
        sequence_indices: int32 [B], the sequences' indices in the global batch; None without key.
        positions: int32 [S], positions in the sequence.
        rate: the probability that an element is dropped, in [0, 1).
    """
    if key is None or rate == 0:
        return x
    assert sequence_indices is not None, "a sequence's mask has its index"
    keep = 1 - rate
    kept = _hash(key, sequence_indices, positions, x.shape[2]) < jnp.uint32(
        min(round(keep * 2**32), 2**32 - 1)
    )
    return jnp.where(kept, x * jnp.asarray(1 / keep, x.dtype), jnp.zeros((), x.dtype))


def _hash(
    key: jax.Array, sequence_indices: jax.Array, positions: jax.Array, hidden: int
) -> jax.Array:
    """Return random bits, uint32 [B, S, H]."""
    first, second = jax.random.key_data(key)
    of_sequence = _mix(first + sequence_indices.astype(jnp.uint32) * jnp.uint32(_ROW))[
        :, None, None
    ]
    of_column = _mix(second + positions.astype(jnp.uint32) * jnp.uint32(_COLUMN))[None, :, None]
    element = jnp.arange(hidden, dtype=jnp.uint32) * jnp.uint32(_ELEMENT)
    return _mix(_mix(of_sequence + element[None, None, :]) ^ of_column)


def _mix(x: jax.Array) -> jax.Array:
    """Mix 32 bits bijectively: every input bit flips each output bit half of the time.

    The finalizer of MurmurHash3 (Appleby 2011).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
