"""Rows copied to where they are computed on, and their results summed back, by gathers alone.

Each of N tokens has up to k places among S, each place up to one token. Copying a token to its
places and summing its places are each other's transposes; with both index maps at hand each is a
gather forwards and backwards, which needs no atomic additions and has one order of summation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from geojax.models.parallel.varying import vary_over, varying_axes


class TokenPermutation(NamedTuple):
    """A partial map of tokens to places, in both directions."""

    of_token: jax.Array
    """int32 [N, k], the places of each token; S for one that it lacks."""
    token_at: jax.Array
    """int32 [S], the token at each place; N for none."""


def permute(x: jax.Array, places: TokenPermutation) -> jax.Array:
    """[S, ...]: the token of `x` [N, ...] that belongs at each place, 0 where there is none."""
    axes = varying_axes(x, places)
    return _permute(x.dtype.name, *vary_over((x, places), axes))


def unpermute(rows: jax.Array, places: TokenPermutation) -> jax.Array:
    """[N, ...]: the sum of each token's places in `rows` [S, ...], in at least float32."""
    axes = varying_axes(rows, places)
    return _unpermute(rows.dtype.name, *vary_over((rows, places), axes))


def _copy(x: jax.Array, places: TokenPermutation) -> jax.Array:
    return x.at[places.token_at].get(mode="fill", fill_value=0)


def _sum(rows: jax.Array, places: TokenPermutation) -> jax.Array:
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((places.of_token.shape[0], *rows.shape[1:]), wide)
    for of_choice in places.of_token.T:
        total = total + rows.at[of_choice].get(mode="fill", fill_value=0).astype(wide)
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(dtype: str, x: jax.Array, places: TokenPermutation) -> jax.Array:
    return _copy(x, places)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpermute(dtype: str, rows: jax.Array, places: TokenPermutation) -> jax.Array:
    return _sum(rows, places)


_permute.defvjp(
    lambda dtype, x, places: (_copy(x, places), places),
    lambda dtype, places, cotangent: (_sum(cotangent, places).astype(dtype), None),
)
_unpermute.defvjp(
    lambda dtype, rows, places: (_sum(rows, places), places),
    lambda dtype, places, cotangent: (_copy(cotangent.astype(dtype), places), None),
)
