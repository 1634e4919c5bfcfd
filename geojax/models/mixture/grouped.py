"""Matrix products of which each row meets the kernel of its own expert.

The rows of an expert are laid next to each other and filled up with zero rows to whole blocks of
`block_rows`, so that a block meets one kernel:

    E = 3 experts, blocks of 4 rows     block   0      1      2      3
                                        expert  0      0      1      2      4 blocks are used,
                                        rows    aaaa   a...   bbb.   cccc   others are left out

A product walks the blocks that are used, whatever their number: an imbalance costs no memory and no
work beyond the rows that there are. (`jax.lax.ragged_dot` would multiply every row with every
expert's kernel: that is how XLA for CPUs and, but behind an experimental flag and then not for the
kernels' gradient, XLA for GPUs runs it.) Blocks of rows of one expert are the idea of Gale et al.
2023 ("MegaBlocks: Efficient Sparse Training with Mixture-of-Experts").
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from geojax.models.varying import vary_over, varying_axes

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 8


class Blocks(NamedTuple):
    """Which rows stand where, for A assignments of rows to E experts and S places in blocks."""

    owner: jax.Array
    """int32 [S / block_rows], the expert of each block."""
    used: jax.Array
    """int32 [], how many blocks hold rows; they are the first ones."""
    places: jax.Array
    """int32 [A], where each assignment's row stands; S where it has none."""
    origins: jax.Array
    """int32 [S], the assignment whose row stands there; A where there is none."""


def block_rows(assignments: int, experts: int) -> int:
    """How many rows a block has: a power of two, so that filling up wastes about a tenth.

    An expert's last block is half empty on average: an eighth of the rows of an expert with an
    average load, at four blocks each.
    """
    average = assignments // (4 * experts)
    return min(max(1 << average.bit_length() >> 1, _SMALLEST_BLOCK), _LARGEST_BLOCK)


def lay_out(assigned: jax.Array, experts: int) -> Blocks:
    """The blocks for `assigned` int32 [A], each assignment's expert; `experts` stands for none.

    An expert's rows keep their order.
    """
    size = block_rows(assigned.shape[0], experts)
    blocks = (assigned.shape[0] + experts * (size - 1)) // size
    order = jnp.argsort(assigned, stable=True).astype(jnp.int32)
    in_order = assigned[order]
    starts = jnp.searchsorted(in_order, jnp.arange(experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    of_expert = -(-(starts[1:] - starts[:-1]) // size)  # blocks
    last = jnp.cumsum(of_expert, dtype=jnp.int32)
    # What belongs to no expert comes last in the order and gets a place behind the last block.
    shift = jnp.append(size * (last - of_expert) - starts[:-1], blocks * size)
    places = jnp.arange(in_order.shape[0], dtype=jnp.int32) + shift[in_order]
    places = jnp.minimum(places, blocks * size)
    owner = jnp.searchsorted(last, jnp.arange(blocks, dtype=jnp.int32), side="right")
    nowhere = jnp.full(blocks * size, assigned.shape[0], jnp.int32)
    return Blocks(
        owner=jnp.minimum(owner.astype(jnp.int32), experts - 1),
        used=last[-1],
        places=jnp.zeros_like(places).at[order].set(places, unique_indices=True),
        origins=nowhere.at[places].set(order, mode="drop"),
    )


def grouped_product(rows: jax.Array, kernels: jax.Array, blocks: Blocks) -> jax.Array:
    """Each row times the kernel of its block's expert; sums are in at least float32.

    Differentiable (reverse mode) in `rows` and `kernels`.

    Args:
        rows: [S, inputs], those without an assignment 0.
        kernels: [E, inputs, outputs].
        blocks: which rows belong to which expert.

    Returns:
        [S, outputs] in the dtype of `rows`; 0 where there is no assignment.
    """
    axes = varying_axes(rows, kernels, blocks)
    return _product(*vary_over((rows, kernels, blocks.owner, blocks.used), axes))


@jax.custom_vjp
def _product(rows: jax.Array, kernels: jax.Array, owner: jax.Array, used: jax.Array) -> jax.Array:
    return _multiply(rows, kernels, owner, used, contracting=0)


_Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _forward(
    rows: jax.Array, kernels: jax.Array, owner: jax.Array, used: jax.Array
) -> tuple[jax.Array, _Residuals]:
    return _product(rows, kernels, owner, used), (rows, kernels, owner, used)


def _backward(
    residuals: _Residuals, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    rows, kernels, owner, used = residuals
    of_rows = _multiply(cotangent, kernels, owner, used, contracting=1)
    return of_rows, _kernels_gradient(rows, cotangent, kernels, owner, used), None, None


_product.defvjp(_forward, _backward)


def _multiply(
    rows: jax.Array, kernels: jax.Array, owner: jax.Array, used: jax.Array, *, contracting: int
) -> jax.Array:
    """[S, outputs]: each block times its kernel, over the kernel's dim `contracting` of two."""
    size = rows.shape[0] // owner.shape[0]
    wide = jnp.promote_types(rows.dtype, jnp.float32)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        block = lax.dynamic_slice_in_dim(rows, index * size, size)
        dims = (((1,), (contracting,)), ((), ()))
        product = lax.dot_general(block, kernels[owner[index]], dims, preferred_element_type=wide)
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), index * size, 0)

    empty = jnp.zeros((rows.shape[0], kernels.shape[2 - contracting]), rows.dtype)
    return _walk(used, body, vary_over(empty, varying_axes(rows)))


def _kernels_gradient(
    rows: jax.Array, cotangent: jax.Array, kernels: jax.Array, owner: jax.Array, used: jax.Array
) -> jax.Array:
    """[E, inputs, outputs]: for each expert the sum over its rows of row^T times cotangent."""
    size = rows.shape[0] // owner.shape[0]
    wide = jnp.promote_types(kernels.dtype, jnp.float32)

    def body(index: jax.Array, total: jax.Array) -> jax.Array:
        block, change = (lax.dynamic_slice_in_dim(x, index * size, size) for x in (rows, cotangent))
        dims = (((0,), (0,)), ((), ()))
        product = lax.dot_general(block, change, dims, preferred_element_type=wide)
        return total.at[owner[index]].add(product)

    zero = vary_over(jnp.zeros(kernels.shape, wide), varying_axes(rows))
    return _walk(used, body, zero).astype(kernels.dtype)


_walk = functools.partial(lax.fori_loop, np.int32(0))
