"""Grouped matmul in plain JAX: a loop over the experts, and one over the blocks of each."""

import jax
import jax.numpy as jnp
from jax import lax

from geojax.collectives.axes import vary_over, varying_axes


def multiply(
    size: int, rows: jax.Array, kernels: jax.Array, ends: jax.Array, *, contracting: int
) -> jax.Array:
    """Multiply each block of rows by its expert's kernel, over the kernel's dim `contracting`.

    Args:
        size: rows of a block.
        rows: [S, inputs].
        kernels: [E, inputs, outputs], or [E, outputs, inputs] with `contracting` 1.
        ends: int32 [E], the block behind each expert's last one.
        contracting: 0 or 1.

    Returns:
        [S, outputs] in the dtype of `rows`, 0 in blocks that are not used.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    dims = (((1,), (contracting,)), ((), ()))

    def of_expert(out: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        kernel, first, end = expert

        def of_block(index: jax.Array, out: jax.Array) -> jax.Array:
            block = lax.dynamic_slice_in_dim(rows, index * size, size)
            product = lax.dot_general(block, kernel, dims, preferred_element_type=wide)
            return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), index * size, 0)

        return lax.fori_loop(first, end, of_block, out), None

    empty = jnp.zeros((rows.shape[0], kernels.shape[2 - contracting]), rows.dtype)
    out = vary_over(empty, varying_axes(rows))
    return lax.scan(of_expert, out, (kernels, _firsts(ends), ends))[0]


def kernels_gradient(
    size: int, rows: jax.Array, cotangent: jax.Array, kernels: jax.Array, ends: jax.Array
) -> jax.Array:
    """Sum row^T times cotangent over the rows of each expert.

    Args:
        size: rows of a block.
        rows: [S, inputs].
        cotangent: [S, outputs].
        kernels: [E, inputs, outputs], for their shape and dtype.
        ends: int32 [E], the block behind each expert's last one.

    Returns:
        [E, inputs, outputs] in the dtype of `kernels`.
    """
    wide = jnp.promote_types(kernels.dtype, jnp.float32)
    zero = vary_over(jnp.zeros(kernels.shape[1:], wide), varying_axes(rows))

    def of_expert(_: None, bounds: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        def of_block(index: jax.Array, total: jax.Array) -> jax.Array:
            block, change = (
                lax.dynamic_slice_in_dim(x, index * size, size) for x in (rows, cotangent)
            )
            dims = (((0,), (0,)), ((), ()))
            return total + lax.dot_general(block, change, dims, preferred_element_type=wide)

        return None, lax.fori_loop(*bounds, of_block, zero).astype(kernels.dtype)

    return lax.scan(of_expert, None, (_firsts(ends), ends))[1]


def _firsts(ends: jax.Array) -> jax.Array:
    """Return each expert's first block, int32 [E]."""
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
