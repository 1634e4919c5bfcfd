"""Operands of the experts' grouped matmuls, quantized to FP8 by a recipe."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from geojax.precision import (
    Axes,
    Backend,
    Format,
    QuantizedWeight,
    Recipe,
    Weight,
    largest_over,
    quantize,
)


class Rounding(NamedTuple):
    """Quantization of the operands of one grouped matmul.

    Operands are 0 rows, 1 kernels and 2 the gradient of the result.
    """

    recipe: Recipe | None
    """FP8 recipe; None: operands are not quantized."""
    backend: Backend
    """FP8 backend: reference holds quantized operands in at least float32, exactly; others in the
    dtype that they came in."""
    axes: Axes
    """Axes over which the operands are sharded."""
    size: int
    """Rows of a block, which belong to one expert."""

    def rows_amax(
        self, rows: jax.Array, ends: jax.Array, amax: jax.Array | None, operand: int
    ) -> jax.Array | None:
        """Return the amax that sets the scale of each expert's rows, [E]; None where smaller blocks
        have scales."""
        if self.recipe is None or not self.recipe.per_tensor:
            return None
        if amax is not None:
            return jnp.broadcast_to(amax[operand], ends.shape)
        blocks = jnp.max(jnp.abs(rows.reshape(rows.shape[0] // self.size, -1)), axis=1)
        experts = jnp.arange(ends.shape[0], dtype=jnp.int32)
        is_own = self._owner(rows, ends) == experts[:, None]
        of_experts = jnp.max(jnp.where(is_own, blocks, 0), axis=1).astype(jnp.float32)
        return largest_over(of_experts, self.axes[operand])

    def kernels_amax(self, kernels: Weight, amax: jax.Array | None) -> jax.Array | None:
        """Return the amax that sets the scale of each expert's kernel, [E]; None where blocks have
        scales, and where the kernels are quantized already."""
        if (
            self.recipe is None
            or not self.recipe.per_tensor
            or isinstance(kernels, QuantizedWeight)
        ):
            return None
        if amax is not None:
            return jnp.broadcast_to(amax[1], kernels.shape[:1])
        of_experts = jnp.max(jnp.abs(kernels), axis=(1, 2)).astype(jnp.float32)
        return largest_over(of_experts, self.axes.w)

    def rows(
        self,
        rows: jax.Array,
        ends: jax.Array,
        operand: int,
        contracting: int,
        amax: jax.Array | None,
        quantized: jax.Array | None,
    ) -> jax.Array:
        """Quantize `rows` [S, ...], or their gradient, for a matmul over dim `contracting`."""
        if self.recipe is None:
            return rows
        form = self.recipe.gradient if operand == 2 else self.recipe.activation
        if amax is not None:  # a block that is not used has no expert, and is 0
            of_blocks = jnp.pad(amax, (0, 1))[self._owner(rows, ends)]
            amax = jnp.repeat(of_blocks, self.size)[:, None]
        return self._quantize(rows, form, contracting, amax, quantized)

    def kernels(
        self,
        kernels: Weight,
        contracting: int,
        amax: jax.Array | None,
        quantized: jax.Array | None,
    ) -> jax.Array:
        """Quantize `kernels` [E, inputs, outputs] for a matmul over dim `contracting` of each."""
        if isinstance(kernels, QuantizedWeight):
            return kernels.quantized.dequantize(self._holding_dtype(kernels.dtype))
        if self.recipe is None:
            return kernels
        form = self.recipe.weight

        def quantize_one(kernel: jax.Array, kernel_amax: jax.Array | None) -> jax.Array:
            return self._quantize(kernel, form, contracting, kernel_amax, quantized)

        return jax.vmap(quantize_one)(kernels, amax)

    def _owner(self, rows: jax.Array, ends: jax.Array) -> jax.Array:
        """Return the expert of each block of rows, int32 [blocks]; E where it is not used."""
        blocks = jnp.arange(rows.shape[0] // self.size, dtype=jnp.int32)
        return jnp.sum(ends <= blocks[:, None], axis=1, dtype=jnp.int32)

    def _quantize(
        self,
        x: jax.Array,
        form: Format,
        contracting: int,
        amax: jax.Array | None,
        quantized: jax.Array | None,
    ) -> jax.Array:
        holding_dtype = self._holding_dtype(x.dtype)
        values = quantize(x, form, contracting, amax).dequantize(holding_dtype)
        return (
            values if quantized is None else jnp.where(quantized, values, x.astype(holding_dtype))
        )

    def _holding_dtype(self, dtype: jnp.dtype) -> jnp.dtype:
        """Return the dtype that holds quantized operands which came in `dtype`."""
        return jnp.promote_types(dtype, jnp.float32) if self.backend == "reference" else dtype
