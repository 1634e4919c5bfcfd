"""Weights that are quantized to FP8 before they are gathered.

    shard ─► quantize ─► all-gather, one byte a number ─► y = x w, dx = dy w^T
                                                          dw = x^T dy ─► grad_proxy

Where one quantization serves both matmuls that read a weight, the rank that holds a shard of it
quantizes it, and FP8 numbers are gathered and kept. The matmuls give the same bits as with a weight
that is quantized after the gather. A gradient belongs to the weight before it was quantized and has
its dtype; so it is taken with respect to `grad_proxy`, a placeholder that nothing reads.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from geojax.collectives.axes import to_varying, varying_axes
from geojax.precision.quantize import Quantized, quantize
from geojax.precision.recipes import Format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight in FP8, or several of the same shape: those of all layers, of all experts."""

    values: jax.Array
    """[..., inputs, outputs], of a format's dtype."""
    scales: jax.Array
    """[...], one scale a weight, or [..., rows, columns] of blocks."""
    largest: jax.Array | None
    """float32 [] (or one for each layer): the largest magnitude in the part of the weight that this
    rank has quantized, for a recipe with a history; None: the recipe has none."""
    block: tuple[int, int] | None = dataclasses.field(metadata={"static": True})
    """Rows and columns of a block; None: the weight is one block."""
    dtype: Any = dataclasses.field(metadata={"static": True})
    """Dtype of the weight before it was quantized."""
    grad_proxy: jax.Array | None = None
    """[..., inputs, outputs] of `dtype`, which the gradient is taken with respect to; None where
    none is taken, and while the weight is gathered and kept."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [..., inputs, outputs]."""
        return self.values.shape

    @property
    def trained(self) -> jax.Array:
        """The `grad_proxy`; where there is none, zeros that vary over the axes of the values."""
        if self.grad_proxy is not None:
            return self.grad_proxy
        return to_varying(jnp.zeros(self.shape, self.dtype), sorted(varying_axes(self.values)))

    @property
    def quantized(self) -> Quantized:
        """The matrix as a matmul reads it, whichever dim it contracts."""
        scales = self.scales
        if self.block is None and scales.ndim:
            scales = scales[..., None, None]
        return Quantized(self.values, scales, self.block)


Weight: TypeAlias = jax.Array | QuantizedWeight
"""Weight of a linear layer: in the compute dtype, or quantized."""


def quantize_weight(
    weight: jax.Array, form: Format, amax: jax.Array | None, largest: jax.Array | None
) -> QuantizedWeight:
    """Quantize `weight` [..., inputs, outputs], or a shard of it, to `form`.

    Args:
        weight: the weight in the compute dtype.
        form: a format whose blocks are the same whichever dim a matmul contracts.
        amax: float32 [...], the magnitude that sets the scale of each weight; None: blocks have
            scales of their own.
        largest: see `QuantizedWeight`.
    """
    assert form.serves_both_dims, "the format serves the matmuls of both dims"
    assert (form.along is None) == (amax is not None), (
        "amax is given if and only if a weight has one scale"
    )
    made = quantize(weight, form, 0, None if amax is None else amax[..., None, None])
    scales = made.scales if amax is None else made.scales[..., 0, 0]
    return QuantizedWeight(made.values, scales, largest, made.block, weight.dtype)


def is_quantized_weight(weight: object) -> bool:
    """Return True for a `QuantizedWeight`."""
    return isinstance(weight, QuantizedWeight)


def split_quantized(weights: Any) -> tuple[Any, Any]:
    """Split a tree of weights into its FP8 part and its differentiable part.

    Returns:
        The quantized weights, without `grad_proxy`, and None in the place of others; and the
        trained ones: those others themselves, and `grad_proxy` of the quantized ones.
    """

    def quantized(leaf: Weight) -> QuantizedWeight | None:
        return (
            dataclasses.replace(leaf, grad_proxy=None)
            if isinstance(leaf, QuantizedWeight)
            else None
        )

    def trained(leaf: Weight) -> jax.Array:
        return leaf.trained if isinstance(leaf, QuantizedWeight) else leaf

    return (
        jax.tree.map(quantized, weights, is_leaf=is_quantized_weight),
        jax.tree.map(trained, weights, is_leaf=is_quantized_weight),
    )


def merge_quantized(quantized: Any, trained: Any) -> Any:
    """Invert `split_quantized`; `trained` may be under differentiation."""

    def one(own: jax.Array, leaf: QuantizedWeight | None) -> Weight:
        return own if leaf is None else dataclasses.replace(leaf, grad_proxy=own)

    return jax.tree.map(one, trained, quantized)
