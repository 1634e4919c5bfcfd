"""Grouped matmul: each row times the kernel of its own expert.

The rows of an expert are laid next to each other and filled up with zero rows to whole blocks of
`block_rows`, so that a block is multiplied by one kernel:

    E = 3 experts, blocks of 4 rows     block   0      1      2      3      4
                                        expert  0      0      1      2
                                        rows    aaaa   a...   bbb.   cccc
                                        ends           2      3      4      the rest is not used

The matmul walks the blocks that are used, whatever their number: an imbalance costs no memory and
no work beyond the rows that there are. (`jax.lax.ragged_dot` would multiply every row with every
expert's kernel: that is how XLA for CPUs and for GPUs runs it, see `benchmarks/grouped_matmul.py`.)
Blocks of rows of one expert are the idea of Gale et al. 2023 ("MegaBlocks: Efficient Sparse
Training with Mixture-of-Experts").
"""

import functools
import itertools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives.axes import vary_over, varying_axes
from geojax.models.moe import grouped_matmul_loops
from geojax.models.moe.quantized_operands import Rounding
from geojax.precision import (
    NO_FP8,
    UNSHARDED,
    Axes,
    LinearMatmul,
    QuantizedWeight,
    Weight,
    largest_each,
    split_quantized,
)
from geojax.runtime.platform import GPU, compute_capability, target_platform

_LARGEST_BLOCK = 256
_SMALLEST_BLOCK = 16


class Blocks(NamedTuple):
    """Layout of A assignments of rows to E experts in blocks of S slots."""

    ends: jax.Array
    """int32 [E], the block behind each expert's last one; the first expert's blocks come first."""
    slots: jax.Array
    """int32 [A], the slot of each assignment's row; S for none."""
    origins: jax.Array
    """int32 [S], the assignment in each slot; A for none."""


def block_rows(assignments: int, experts: int) -> int:
    """Return the rows of a block: a power of two, so that padding wastes about a tenth.

    An expert's last block is half empty on average: an eighth of the rows of an expert with an
    average load, at four blocks each.
    """
    average = assignments // (4 * experts)
    smallest = _mosaic().ROWS if target_platform() is GPU else _SMALLEST_BLOCK
    return min(max(1 << average.bit_length() >> 1, smallest), _LARGEST_BLOCK)


def lay_out(assigned: jax.Array, experts: int) -> Blocks:
    """Lay out `assigned` int32 [A], each assignment's expert; `experts` stands for none.

    An expert's rows keep their order.
    """
    size = block_rows(assigned.shape[0], experts)
    blocks = (assigned.shape[0] + experts * (size - 1)) // size
    order = jnp.argsort(assigned, stable=True).astype(jnp.int32)
    counts = count_each(assigned, experts)
    of_expert = -(-counts // size)  # blocks
    ends = jnp.cumsum(of_expert, dtype=jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts  # in the order
    # An assignment to no expert comes last in the order and gets a slot behind the last block.
    shift = size * (ends - of_expert) - starts
    shift = jnp.pad(shift, (0, 1), constant_values=blocks * size)
    slots = jnp.arange(order.shape[0], dtype=jnp.int32) + shift[assigned[order]]
    slots = jnp.minimum(slots, blocks * size)
    nowhere = jnp.full(blocks * size, assigned.shape[0], jnp.int32)
    return Blocks(
        ends=ends,
        slots=jnp.zeros_like(slots).at[order].set(slots, unique_indices=True),
        origins=nowhere.at[slots].set(order, mode="drop"),
    )


def count_each(numbers: jax.Array, limit: int) -> jax.Array:
    """Count each of 0 to `limit` - 1 in `numbers` int32 [A]; returns int32 [limit]."""
    each = jnp.arange(limit, dtype=jnp.int32)
    return jnp.sum(numbers == each[:, None], axis=1, dtype=jnp.int32)


def grouped_product(
    rows: jax.Array,
    kernels: tuple[Weight, ...],
    blocks: Blocks,
    matmul: LinearMatmul = NO_FP8,
    amax: tuple[jax.Array | None, ...] | None = None,
    axes: Axes = UNSHARDED,
) -> jax.Array:
    """Multiply each row by the kernels of its block's expert; sums are in at least float32.

    Kernels that read the same rows are one wide kernel, so that the rows are read once, and their
    gradient is one sum and not one for each kernel. Differentiable (reverse mode) in `rows` and
    `kernels`.

    Args:
        rows: [S, inputs], those without an assignment 0.
        kernels: [E, inputs, outputs] each; see `geojax.precision.LinearMatmul.multiply`.
        blocks: the rows of each expert.
        matmul: its recipe quantizes the operands; they are multiplied in the dtype that they are
            held in, since there is no grouped matmul of FP8 numbers.
        amax: of each kernel's matmul, see `geojax.precision.LinearMatmul.multiply`; None: no recipe
            with a history. Histories of the same rows agree on them.
        axes: as for `LinearMatmul.multiply`; one tensor is the rows of one expert on this rank, or
            its kernel.

    Returns:
        [S, outputs of all kernels], one kernel's beside another's, in the dtype of `rows`; 0 where
        there is no assignment.
    """
    size = block_rows(blocks.slots.shape[0], kernels[0].shape[0])
    varying = varying_axes(rows, kernels, blocks.ends)
    operands = vary_over((rows, *split_quantized(kernels), blocks.ends), varying)
    how = Rounding(matmul.recipe, matmul.backend, axes, size)
    return _product(how, *operands, amax or (None,) * len(kernels), matmul.quantized)


def _functions(*operands: jax.Array) -> ModuleType:
    """Choose the implementation: kernels for operands of 16 bits on Hopper GPUs, else loops."""
    hopper = target_platform() is GPU and compute_capability()[0] == 9
    narrow = all(jnp.dtype(x.dtype).itemsize == 2 for x in operands)
    return _mosaic() if hopper and narrow else grouped_matmul_loops


def _mosaic() -> ModuleType:
    """Import the kernels where there are GPUs for them: that takes a quarter of a second."""
    from geojax.models.moe import grouped_matmul_mosaic

    return grouped_matmul_mosaic


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    how: Rounding,
    rows: jax.Array,
    quantized_kernels: tuple[QuantizedWeight | None, ...],
    trained: tuple[jax.Array, ...],
    ends: jax.Array,
    amax: tuple[jax.Array | None, ...],
    quantized: jax.Array | None,
) -> jax.Array:
    return _forward(how, rows, quantized_kernels, trained, ends, amax, quantized)[0]


class _GroupedResiduals(NamedTuple):
    rows: jax.Array
    kernels: tuple[Weight, ...]
    ends: jax.Array
    amax: tuple[jax.Array | None, ...]
    quantized: jax.Array | None
    rows_amax: jax.Array | None
    """[E], the largest magnitude of each expert's rows, if that sets their scale."""
    kernels_amax: tuple[jax.Array | None, ...]
    """[E], the largest magnitude of each expert's kernel, if that sets its scale."""


def _forward(
    how: Rounding,
    rows: jax.Array,
    quantized_kernels: tuple[QuantizedWeight | None, ...],
    trained: tuple[jax.Array, ...],
    ends: jax.Array,
    amax: tuple[jax.Array | None, ...],
    quantized: jax.Array | None,
) -> tuple[jax.Array, _GroupedResiduals]:
    kernels = tuple(
        whole if rounded is None else rounded
        for rounded, whole in zip(quantized_kernels, trained, strict=True)
    )
    rows_amax = how.rows_amax(rows, ends, amax[0], 0)
    kernels_amax = tuple(map(how.kernels_amax, kernels, amax))
    kept = _GroupedResiduals(rows, kernels, ends, amax, quantized, rows_amax, kernels_amax)
    operands = how.rows(rows, ends, 0, 1, rows_amax, quantized), _wide_kernel(how, kept, 0)
    product = _functions(*operands).multiply(how.size, *operands, ends, contracting=0)
    return product.astype(rows.dtype), kept


def _backward(how: Rounding, kept: _GroupedResiduals, cotangent: jax.Array) -> tuple[Any, ...]:
    rows, kernels, ends, amax, quantized = kept[:5]
    cotangents = _split(cotangent, kernels)
    cotangents_amax = [
        how.rows_amax(x, ends, own, 2) for x, own in zip(cotangents, amax, strict=True)
    ]

    def wide_cotangent(contracting: int) -> jax.Array:
        if how.recipe is None:
            return cotangent
        rounded = (
            how.rows(x, ends, 2, contracting, own, quantized)
            for x, own in zip(cotangents, cotangents_amax, strict=True)
        )
        return jnp.concatenate(list(rounded), axis=1)

    operands = wide_cotangent(1), _wide_kernel(how, kept, 1)
    rows_gradient = _functions(*operands).multiply(how.size, *operands, ends, contracting=1)
    operands = how.rows(rows, ends, 0, 0, kept.rows_amax, quantized), wide_cotangent(0)
    shape = (*kernels[0].shape[:2], cotangent.shape[1])
    kernels_gradient = _functions(*operands).kernels_gradient(
        how.size, *operands, jax.ShapeDtypeStruct(shape, kernels[0].dtype), ends
    )
    new_amax = tuple(
        None if own is None else largest_each(rows, kernel, x)
        for own, kernel, x in zip(amax, kernels, cotangents, strict=True)
    )
    gradients = tuple(_split(kernels_gradient, kernels))
    no_gradients = (None,) * len(kernels)
    return rows_gradient.astype(rows.dtype), no_gradients, gradients, None, new_amax, None


_product.defvjp(_forward, _backward)


def _wide_kernel(how: Rounding, kept: _GroupedResiduals, contracting: int) -> jax.Array:
    """Lay the quantized kernels beside each other, [E, inputs, outputs of all]."""
    rounded = (
        how.kernels(kernel, contracting, own, kept.quantized)
        for kernel, own in zip(kept.kernels, kept.kernels_amax, strict=True)
    )
    return jnp.concatenate(list(rounded), axis=2)


def _split(wide: jax.Array, kernels: tuple[Weight, ...]) -> list[jax.Array]:
    """Split [..., outputs of all kernels] into the part of each."""
    ends = itertools.accumulate(kernel.shape[2] for kernel in kernels[:-1])
    return jnp.split(wide, list(ends), axis=-1)
