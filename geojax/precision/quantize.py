"""Matrices in FP8: numbers of eight bits, and the scales of their blocks.

    block of x ─► amax ─► scale = amax / largest number of the format ─► round(x / scale)

The scale is what the numbers are multiplied by to get x back. (TransformerEngine calls its inverse
the scale.) Every number times its scale is exact in float32: there are 4 bits of mantissa in the
one and 8 at most in the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from geojax.precision.recipes import Format

_SMALLEST = 2.0**-126
"""Least scale: the smallest normal number of float32, bfloat16 and (almost) E8M0."""


class Quantized(NamedTuple):
    """A matrix in FP8, or several of the same shape, with the scales of its blocks."""

    values: jax.Array
    """[..., rows, columns], of a format's dtype."""
    scales: jax.Array
    """Scales: [], or a shape that broadcasts to `values`, with one scale per tensor; else
    [..., rows, columns] of blocks that cover a matrix."""
    block: tuple[int, int] | None
    """Rows and columns of a block; None: the tensor is one block."""

    def dequantize(self, dtype: jnp.dtype) -> jax.Array:
        """Return the matrix [..., rows, columns] in `dtype`; exact in float32 and wider."""
        scales = self.scales
        if self.block is not None:
            for dim, size in zip((-2, -1), self.block, strict=True):
                scales = jnp.repeat(scales, size, axis=dim)
            rows, columns = self.values.shape[-2:]
            scales = scales[..., :rows, :columns]
        return self.values.astype(dtype) * scales.astype(dtype)


def largest(x: jax.Array) -> jax.Array:
    """Return the largest magnitude in `x`, float32 []."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize(
    x: jax.Array, form: Format, contracting: int, amax: jax.Array | None = None
) -> Quantized:
    """Quantize the matrix `x` to FP8; larger numbers saturate at the largest of the format.

    A block that holds a NaN or an infinity becomes NaN, unless `amax` is given.

    Args:
        x: [rows, columns], or several such matrices, [..., rows, columns].
        form: the format.
        contracting: the dim, 0 or 1, that the matmul contracts, along which blocks are counted.
        amax: float32, [] or what broadcasts to `x`: the largest magnitude that a format of one
            scale per tensor should hold; None: the largest in `x`.
    """
    if form.along is None:
        scales = scales_for(largest(x) if amax is None else amax, form)
        return Quantized(_round(x, scales, form), scales, None)
    block = (form.along, form.across) if contracting == 0 else (form.across, form.along)
    *others, rows, columns = x.shape
    blocks = [-(-size // part) for size, part in zip((rows, columns), block, strict=True)]
    missing = [n * b - size for n, b, size in zip(blocks, block, (rows, columns), strict=True)]
    padded = x
    if any(missing):
        padded = jnp.pad(x, [*[(0, 0)] * len(others), *[(0, end) for end in missing]])
    apart = padded.reshape(*others, blocks[0], block[0], blocks[1], block[1])
    scales = scales_for(jnp.max(jnp.abs(apart), axis=(-3, -1)).astype(jnp.float32), form)
    values = _round(apart, scales[..., :, None, :, None], form).reshape(padded.shape)
    return Quantized(values[..., :rows, :columns], scales, block)


def _round(x: jax.Array, scales: jax.Array, form: Format) -> jax.Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    limit = float(jnp.finfo(form.dtype).max)
    scaled = x.astype(wide) * (1 / scales.astype(wide))
    return jnp.clip(scaled, -limit, limit).astype(form.dtype)


def scales_for(amax: jax.Array, form: Format) -> jax.Array:
    """Return the scale of each block with largest magnitude `amax`; 1 where that is 0."""
    scales = amax / float(jnp.finfo(form.dtype).max)
    if form.power_of_two:
        mantissa, exponent = jnp.frexp(scales)  # the mantissa is at least 1/2 and below 1
        up = exponent - (mantissa == 0.5).astype(exponent.dtype)
        scales = jnp.ldexp(jnp.ones_like(scales), up)
    scales = jnp.where(amax > 0, jnp.maximum(scales, _SMALLEST), 1)
    return jnp.where(jnp.isfinite(amax), scales, jnp.nan).astype(form.scale_dtype)
