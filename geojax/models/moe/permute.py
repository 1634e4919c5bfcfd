"""Permutation of tokens to slots and back, by gathers alone.

Each of N tokens has up to k slots among S, each slot up to one token. Copying a token to its slots
and summing its slots are each other's transposes; with both index maps at hand each is a gather
forward and backward, which needs no atomic additions and has one order of summation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives.axes import vary_over, varying_axes


class TokenPermutation(NamedTuple):
    """Partial map of N tokens to S slots, in both directions."""

    of_token: jax.Array
    """int32 [N, k], the slots of each token; S for a missing one."""
    token_at: jax.Array
    """int32 [S], the token in each slot; N for none."""


def permute(x: jax.Array, permutation: TokenPermutation) -> jax.Array:
    """Copy the tokens of `x` [N, ...] to their slots, [S, ...]; 0 where a slot is empty."""
    axes = varying_axes(x, permutation)
    return _permute(x.dtype.name, *vary_over((x, permutation), axes))


def unpermute(rows: jax.Array, permutation: TokenPermutation) -> jax.Array:
    """Sum each token's slots in `rows` [S, ...], [N, ...] in at least float32."""
    axes = varying_axes(rows, permutation)
    return _unpermute(rows.dtype.name, *vary_over((rows, permutation), axes))


def _copy(x: jax.Array, permutation: TokenPermutation) -> jax.Array:
    return x.at[permutation.token_at].get(mode="fill", fill_value=0)


def _sum(rows: jax.Array, permutation: TokenPermutation) -> jax.Array:
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    total = jnp.zeros((permutation.of_token.shape[0], *rows.shape[1:]), wide)
    for of_choice in permutation.of_token.T:
        total = total + rows.at[of_choice].get(mode="fill", fill_value=0).astype(wide)
    return total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _permute(dtype: str, x: jax.Array, permutation: TokenPermutation) -> jax.Array:
    return _copy(x, permutation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unpermute(dtype: str, rows: jax.Array, permutation: TokenPermutation) -> jax.Array:
    return _sum(rows, permutation)


_permute.defvjp(
    lambda dtype, x, permutation: (_copy(x, permutation), permutation),
    lambda dtype, permutation, cotangent: (_sum(cotangent, permutation).astype(dtype), None),
)
_unpermute.defvjp(
    lambda dtype, rows, permutation: (_sum(rows, permutation), permutation),
    lambda dtype, permutation, cotangent: (_copy(cotangent.astype(dtype), permutation), None),
)
