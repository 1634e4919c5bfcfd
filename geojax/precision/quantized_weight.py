"""Weights that are rounded to FP8 before they come to where they are multiplied.

    shard ─► round ─► gather, one byte a number ─► y = x w, dx = dy w^T
                                                   dw = x^T dy ─► stand-in

Where one rounding serves both products that read a weight, whoever holds a shard of it can round
it, and what travels and is kept are FP8 numbers. Their products are those of the weight that is
rounded where it is multiplied, bit by bit. A gradient is one of the weight before it was rounded
and has its dtype; so it is taken of a *stand-in* for that weight, which nothing reads.
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
    """One weight, or several of the same shape: of all layers, of all experts."""

    values: jax.Array
    """[..., inputs, outputs], of a format's dtype."""
    scales: jax.Array
    """[...] of each weight; of blocks [..., rows, columns]."""
    largest: jax.Array | None
    """float32 [] (or one for each layer): the largest magnitude in that part of the weight which
    this rank has rounded, for a recipe with a history; None: nobody asks for it."""
    block: tuple[int, int] | None = dataclasses.field(metadata={"static": True})
    """Rows and columns of a block; None: the weight is one."""
    dtype: Any = dataclasses.field(metadata={"static": True})
    """Of the weight before it was rounded."""
    grad_proxy: jax.Array | None = None
    """[..., inputs, outputs] of `dtype`, in whose place the gradient comes; None where none is
    taken, and while the weight travels and is kept."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., inputs, outputs]."""
        return self.values.shape

    @property
    def trained(self) -> jax.Array:
        """The stand-in; where there is none yet zeros, typed as varying as the values are."""
        if self.grad_proxy is not None:
            return self.grad_proxy
        return to_varying(jnp.zeros(self.shape, self.dtype), sorted(varying_axes(self.values)))

    @property
    def quantized(self) -> Quantized:
        """As a product reads it, whichever dim it contracts."""
        scales = self.scales
        if self.block is None and scales.ndim:
            scales = scales[..., None, None]
        return Quantized(self.values, scales, self.block)


Weight: TypeAlias = jax.Array | QuantizedWeight
"""What a linear layer multiplies with: in the compute dtype, or rounded already."""


def quantize_weight(
    weight: jax.Array, form: Format, amax: jax.Array | None, largest: jax.Array | None
) -> QuantizedWeight:
    """`weight` [..., inputs, outputs], whole or a part, rounded to `form`.

    Args:
        weight: in the dtype that it would be multiplied in.
        form: a format for which it does not matter which dim a product contracts.
        amax: float32 [...], the magnitude that the scale of each weight is made for; None: blocks
            have scales of their own.
        largest: see `QuantizedWeight`.
    """
    assert form.serves_both_dims, "one rounding is for all products"
    assert (form.along is None) == (amax is not None), "one scale a weight is one for all its parts"
    made = quantize(weight, form, 0, None if amax is None else amax[..., None, None])
    scales = made.scales if amax is None else made.scales[..., 0, 0]
    return QuantizedWeight(made.values, scales, largest, made.block, weight.dtype)


def is_quantized_weight(weight: object) -> bool:
    """Whether it is a `QuantizedWeight`."""
    return isinstance(weight, QuantizedWeight)


def split_quantized(weights: Any) -> tuple[Any, Any]:
    """A tree of weights as what a gradient is taken of and what it is not: see `merge_quantized`.

    Returns:
        The rounded weights, without stand-ins, and None in the place of others; and the trained
        ones: those others themselves, and the stand-ins of the rounded ones.
    """

    def rounded(leaf: Weight) -> QuantizedWeight | None:
        return (
            dataclasses.replace(leaf, grad_proxy=None)
            if isinstance(leaf, QuantizedWeight)
            else None
        )

    def trained(leaf: Weight) -> jax.Array:
        return leaf.trained if isinstance(leaf, QuantizedWeight) else leaf

    return (
        jax.tree.map(rounded, weights, is_leaf=is_quantized_weight),
        jax.tree.map(trained, weights, is_leaf=is_quantized_weight),
    )


def merge_quantized(rounded: Any, trained: Any) -> Any:
    """The inverse of `split_quantized`, where `trained` may be under differentiation."""

    def one(own: jax.Array, leaf: QuantizedWeight | None) -> Weight:
        return own if leaf is None else dataclasses.replace(leaf, grad_proxy=own)

    return jax.tree.map(one, trained, rounded)
