"""Matrix products of which each row meets the kernel of its own expert.

The rows of an expert are laid next to each other and filled up with zero rows to whole blocks of
`block_rows`, so that a block meets one kernel:

    E = 3 experts, blocks of 4 rows     block   0      1      2      3      4
                                        expert  0      0      1      2
                                        rows    aaaa   a...   bbb.   cccc
                                        ends           2      3      4      the rest is not used

A product walks the blocks that are used, whatever their number: an imbalance costs no memory and no
work beyond the rows that there are. (`jax.lax.ragged_dot` would multiply every row with every
expert's kernel: that is how XLA for CPUs and, but behind an experimental flag and then not for the
kernels' gradient, XLA for GPUs runs it.) Blocks of rows of one expert are the idea of Gale et al.
2023 ("MegaBlocks: Efficient Sparse Training with Mixture-of-Experts").
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.models.mixture import grouped_loops, grouped_triton
from geojax.models.platform import GPU_PLATFORMS, target_platform
from geojax.models.varying import vary_over, varying_axes

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 16


class Blocks(NamedTuple):
    """Which rows stand where, for A assignments of rows to E experts and S places in blocks."""

    ends: jax.Array
    """int32 [E], the block behind each expert's last one; the first expert's blocks come first."""
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
    counts = count_each(assigned, experts)
    of_expert = -(-counts // size)  # blocks
    ends = jnp.cumsum(of_expert, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts  # in the order
    # What belongs to no expert comes last in the order and gets a place behind the last block.
    shift = size * (ends - of_expert) - starts
    shift = jnp.pad(shift, (0, 1), constant_values=blocks * size)
    places = jnp.arange(order.shape[0], dtype=jnp.int32) + shift[assigned[order]]
    places = jnp.minimum(places, blocks * size)
    nowhere = jnp.full(blocks * size, assigned.shape[0], jnp.int32)
    return Blocks(
        ends=ends,
        places=jnp.zeros_like(places).at[order].set(places, unique_indices=True),
        origins=nowhere.at[places].set(order, mode="drop"),
    )


def count_each(numbers: jax.Array, limit: int) -> jax.Array:
    """int32 [limit], how often each of 0 to `limit` - 1 is in `numbers` int32 [A]."""
    each = jnp.arange(limit, dtype=jnp.int32)
    return jnp.sum(numbers == each[:, None], axis=1, dtype=jnp.int32)


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
    size = block_rows(blocks.places.shape[0], kernels.shape[0])
    axes = varying_axes(rows, kernels, blocks.ends)
    return _product(size, *vary_over((rows, kernels, blocks.ends), axes))


def _functions(dtype: Any) -> ModuleType:
    """Who runs the products: Triton kernels on a GPU that has the dtype, loops anywhere else."""
    on_gpu = target_platform() in GPU_PLATFORMS
    return grouped_triton if on_gpu and jnp.dtype(dtype).itemsize <= 4 else grouped_loops


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(size: int, rows: jax.Array, kernels: jax.Array, ends: jax.Array) -> jax.Array:
    return _functions(rows.dtype).multiply(size, rows, kernels, ends, contracting=0)


_Residuals = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    size: int, rows: jax.Array, kernels: jax.Array, ends: jax.Array
) -> tuple[jax.Array, _Residuals]:
    return _product(size, rows, kernels, ends), (rows, kernels, ends)


def _backward(
    size: int, residuals: _Residuals, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, ends = residuals
    functions = _functions(rows.dtype)
    of_rows = functions.multiply(size, cotangent, kernels, ends, contracting=1)
    return of_rows, functions.kernels_gradient(size, rows, cotangent, kernels, ends), None


_product.defvjp(_forward, _backward)
