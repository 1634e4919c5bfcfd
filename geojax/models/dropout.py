"""Dropout whose masks depend on what is dropped and not on where it is computed.

Whether element i of the residual stream at a column of a row is dropped is a hash of the key
(which holds seed, step, layer and which dropout), the row's index in the global batch, the column's
position in the row, and i. Every layout therefore draws the same masks, and nothing is stored for
the backward pass that could not be computed again.
"""

import jax
import jax.numpy as jnp

# Odd constants that spread consecutive indices over 32 bits: the golden ratio, and two primes.
_ROW, _COLUMN, _ELEMENT = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D


def dropout(
    x: jax.Array, key: jax.Array | None, rows: jax.Array, columns: jax.Array, rate: float
) -> jax.Array:
    """`x` [rows, columns, hidden] with a share `rate` of it zeroed and the rest scaled up.

    Args:
        x: the activations.
        key: a JAX key that holds seed, step, layer and which dropout this is; None drops nothing.
        rows: int32 [rows], the rows' indices in the global batch.
        columns: int32 [columns], the columns' positions in the row.
        rate: the probability that an element is dropped, in [0, 1).
    """
    if key is None or rate == 0:
        return x
    keep = 1 - rate
    kept = _hash(key, rows, columns, x.shape[2]) < jnp.uint32(min(round(keep * 2**32), 2**32 - 1))
    return jnp.where(kept, x * jnp.asarray(1 / keep, x.dtype), jnp.zeros((), x.dtype))


def _hash(key: jax.Array, rows: jax.Array, columns: jax.Array, hidden: int) -> jax.Array:
    """Random bits, uint32 [rows, columns, hidden]."""
    first, second = jax.random.key_data(key)
    of_row = _mix(first + rows.astype(jnp.uint32) * jnp.uint32(_ROW))[:, None, None]
    of_column = _mix(second + columns.astype(jnp.uint32) * jnp.uint32(_COLUMN))[None, :, None]
    element = jnp.arange(hidden, dtype=jnp.uint32) * jnp.uint32(_ELEMENT)
    return _mix(_mix(of_row + element[None, None, :]) ^ of_column)


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every input bit flips each output bit half of the time.

    The finaliser of MurmurHash3 (Appleby 2011).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
