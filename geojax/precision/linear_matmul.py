"""The matrix products of linear layers: one seam, in the compute dtype or by an FP8 recipe.

    y  = x w       x and w rounded along inputs
    dx = dy w^T    dy and w rounded along outputs
    dw = x^T dy    x and dy rounded along tokens

What is kept for the backward pass are x and w as they came, since x is recomputed more often than
kept and w is at hand again; each product rounds them along the dim that it contracts. A w whose
rounding serves both of its products may come rounded (`geojax.precision.quantized_weight`).

*Per tensor* means: per matrix that one product of one device would have, had it the rows of its
data-parallel rank and the whole model. So the largest magnitude of an operand is taken over the
ranks of `tensor` and `context` that hold parts of it, and no others: rows of other data-parallel
ranks are other tensors, as are those of other microbatches, and nothing crosses `dc`. The result
then does not depend on how a layer is cut, nor on whether rows are spread over ranks or
microbatches, and ranks wait for no other ranks than they do for the product.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.collectives.axes import to_varying, varying_axes
from geojax.precision import transformer_engine
from geojax.precision.quantize import largest, quantize
from geojax.precision.quantized_weight import QuantizedWeight, Weight, split_quantized
from geojax.precision.recipes import Format, Recipe

_PRODUCT, _AMAX = "linear_product", "linear_amax"

SAVEABLE_MATMULS = (_PRODUCT, _AMAX)
"""Names of results that rematerialisation policies keep which keep matrix products."""

AMAX = "amax"
"""What a linear layer's tree calls the magnitudes to expect, and its gradient's those seen."""

Backend = Literal["reference", "xla", "transformer_engine"]
"""Who multiplies FP8 numbers. reference: plain JAX, which turns them into at least float32 and
multiplies those: exact, anywhere, and not fast. xla: XLA for NVIDIA GPUs, as FP8 products of
cuBLASLt; for recipes with a scale per tensor. transformer_engine: kernels of TransformerEngine for
NVIDIA GPUs, which round, and hand the product to cuBLASLt; for the same recipes."""


class Axes(NamedTuple):
    """Over which mesh axes the ranks hold parts of the operands of one product; not of size 1."""

    x: tuple[str, ...] = ()
    w: tuple[str, ...] = ()
    dy: tuple[str, ...] = ()


UNSHARDED = Axes()
"""Every rank holds its operands whole."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearMatmul:
    """How the linear layers of a model multiply.

    A pytree whose only leaf is `quantized`.
    """

    recipe: Recipe | None = dataclasses.field(default=None, metadata={"static": True})
    """None: in the compute dtype."""
    backend: Backend = dataclasses.field(default="reference", metadata={"static": True})
    """Who multiplies by the recipe."""
    quantized: jax.Array | None = None
    """bool []: whether the layer at hand follows the recipe; None: it does."""

    def spans(self, layers: int) -> list[tuple[int, "LinearMatmul"]]:
        """Of a model of so many layers, how many in a row multiply in which way."""
        ends = self.recipe.num_bf16_layers_per_end if self.recipe else 0
        inner = max(layers - 2 * ends, 0)
        first = min(ends, layers)
        spans = [(first, NO_FP8), (inner, self), (layers - first - inner, NO_FP8)]
        return [(count, matmul) for count, matmul in spans if count]

    def at_layer(self, index: jax.Array, layers: int) -> "LinearMatmul":
        """The products of the layer that is number `index` of `layers`, if only the running program
        knows the number: it then chooses by it."""
        if self.recipe is None or self.recipe.num_bf16_layers_per_end == 0:
            return self
        ends = self.recipe.num_bf16_layers_per_end
        return dataclasses.replace(self, quantized=(index >= ends) & (index < layers - ends))

    def multiply(
        self, x: jax.Array, w: Weight, amax: jax.Array | None = None, axes: Axes = UNSHARDED
    ) -> jax.Array:
        """`x` [tokens, inputs] times `w` [inputs, outputs], in the dtype of `x`.

        Differentiable (reverse mode) in `x` and `w`; may be called inside a `shard_map`. By a
        recipe sums are in at least float32 and the result is rounded once.

        Args:
            x: the activations.
            w: the weights, of the dtype of `x` before they were rounded, if they are; a recipe that
                rounds them along the dim that is contracted has to round them itself.
            amax: float32 [3], of a recipe with a history: the magnitudes of x, w and dy to expect.
                Its gradient is no gradient but [3] the largest magnitudes that this rank saw. It
                must vary over all axes that x and w vary over, since nothing may sum that.
            axes: over which axes `x`, `w` and the gradient of the result are parts.
        """
        rounded, trained = split_quantized(w)
        if self.recipe is None:
            assert rounded is None, "a plain layer rounds nothing"
            return x @ trained
        assert rounded is None or self.quantized is None, "nor one that may be plain"
        assert x.dtype == w.dtype, f"activations of {x.dtype}, weights of {w.dtype}"
        assert (amax is None) == (self.recipe.history == 0), "a history tells what to expect"
        varying = varying_axes(x) | varying_axes(trained)
        if amax is not None:
            assert varying_axes(amax) >= varying, "what ranks see must not be summed"
            varying = varying_axes(amax)
        x, trained, rounded = jax.tree.map(
            functools.partial(to_varying, axes=sorted(varying)), (x, trained, rounded)
        )
        how = _How(self.recipe, self.backend, axes)
        return checkpoint_name(_product(how, x, trained, rounded, amax, self.quantized), _PRODUCT)


NO_FP8 = LinearMatmul()
"""In the compute dtype."""


class _How(NamedTuple):
    recipe: Recipe
    backend: Backend
    axes: Axes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    how: _How,
    x: jax.Array,
    w: jax.Array,
    rounded: QuantizedWeight | None,
    amax: jax.Array | None,
    quantized: jax.Array | None,
) -> jax.Array:
    return _forward(how, x, w, rounded, amax, quantized)[0]


class _Residuals(NamedTuple):
    x: jax.Array
    w: Weight
    amax: jax.Array | None
    quantized: jax.Array | None
    amax_x: jax.Array | None
    amax_w: jax.Array | None


def _forward(
    how: _How,
    x: jax.Array,
    w: jax.Array,
    rounded: QuantizedWeight | None,
    amax: jax.Array | None,
    quantized: jax.Array | None,
) -> tuple[jax.Array, _Residuals]:
    of_x = _expected(x, how.axes.x, how.recipe.activation, amax, 0)
    of_w = None
    if rounded is None:
        of_w = _expected(w, how.axes.w, how.recipe.weight, amax, 1)
    kept = _Residuals(x, w if rounded is None else rounded, amax, quantized, of_x, of_w)

    def by_recipe() -> jax.Array:
        left = _rounding(how, x, how.recipe.activation, of_x)
        return _dot(how, left, _weight(how, kept), (1, 0), x.dtype)

    return _choose(quantized, by_recipe, lambda: x @ w), kept


def _backward(
    how: _How, kept: _Residuals, dy: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array | None, None]:
    x, w, recipe = kept.x, kept.w, how.recipe
    of_dy = _expected(dy, how.axes.dy, recipe.gradient, kept.amax, 2)

    def round_dy() -> _Rounding:
        return _rounding(how, dy, recipe.gradient, of_dy)

    # Once for both products, unless each has yet to choose.
    once = round_dy() if kept.quantized is None else None

    def dx_by_recipe() -> jax.Array:
        return _dot(how, once or round_dy(), _weight(how, kept), (1, 1), x.dtype)

    def dw_by_recipe() -> jax.Array:
        left = _rounding(how, x, recipe.activation, kept.amax_x)
        return _dot(how, left, once or round_dy(), (0, 0), x.dtype)

    def plain_dx() -> jax.Array:
        assert not isinstance(w, QuantizedWeight), "a layer that may be plain has its weights"
        return dy @ w.T

    # Two choices, so that a pipeline can put off the one and not the other.
    dx = _choose(kept.quantized, dx_by_recipe, plain_dx)
    dw = _choose(kept.quantized, dw_by_recipe, lambda: x.T @ dy)
    seen = None if kept.amax is None else largest_each(x, w, dy)
    return dx, dw, None, seen, None


_product.defvjp(_forward, _backward)


def _expected(
    x: jax.Array, axes: tuple[str, ...], form: Format, amax: jax.Array | None, operand: int
) -> jax.Array | None:
    """What the scale of a tensor is made for; None where blocks have theirs."""
    if form.along is not None:
        return None
    if amax is not None:
        return amax[operand]
    return largest_over(largest(x), axes)


def largest_over(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The largest of each number over the ranks of `axes`."""
    # (What is the same along an axis is the largest there already.)
    parts = tuple(axis for axis in axes if axis in varying_axes(amax))
    return checkpoint_name(lax.pmax(amax, parts), _AMAX) if parts else amax


def largest_each(x: jax.Array, w: Weight, dy: jax.Array) -> jax.Array:
    """float32 [3], the largest magnitudes in the operands of a product, on this rank: of a weight
    that came rounded, in the part that this rank has rounded."""
    of_w = w.largest if isinstance(w, QuantizedWeight) else largest(w)
    assert of_w is not None, "who rounds for a recipe with a history says what it saw"
    return jnp.stack([largest(x), of_w, largest(dy)])


def accumulate(sums: Any, new: Any) -> Any:
    """`sums` of gradients plus `new` ones, in the dtypes of `sums`; of magnitudes the larger ones.

    Args:
        sums: trees like the parameters; leaves called `AMAX` are largest magnitudes.
        new: in the same structure.
    """

    def one(path: tuple[Any, ...], total: jax.Array, leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(total.dtype)
        return jnp.maximum(total, leaf) if is_amax(path) else total + leaf

    return jax.tree_util.tree_map_with_path(one, sums, new)


def is_amax(path: tuple[Any, ...]) -> bool:
    """Whether the leaf of a tree like the parameters at `path` is one of largest magnitudes."""
    return getattr(path[-1], "key", None) == AMAX if path else False


_Rounding = Callable[[int], Any]
"""A matrix in FP8, as the backend holds it, by the dim that a product contracts."""


def _rounding(how: _How, x: jax.Array, form: Format, amax: jax.Array | None) -> _Rounding:
    if how.backend == "transformer_engine":
        return transformer_engine.quantize(x, form, amax)
    return lambda contracting: quantize(x, form, contracting, amax)


def _weight(how: _How, kept: _Residuals) -> _Rounding:
    if not isinstance(kept.w, QuantizedWeight):
        return _rounding(how, kept.w, how.recipe.weight, kept.amax_w)
    rounded = kept.w.quantized
    if how.backend == "transformer_engine":
        return transformer_engine.rounded(rounded, kept.w.dtype)
    return lambda contracting: rounded


def _dot(
    how: _How, left: _Rounding, right: _Rounding, contracting: tuple[int, int], dtype: jnp.dtype
) -> jax.Array:
    """The product of two matrices over one dim of each, summed in at least float32.

    XLA for GPUs sees FP8 numbers that are multiplied by a scale and then with each other, and lets
    cuBLASLt do all of it: that product never stands in `dtype`.
    """
    one, other = left(contracting[0]), right(contracting[1])
    if how.backend == "transformer_engine":
        return transformer_engine.multiply(one, other, contracting).astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    held = wide if how.backend == "reference" else dtype
    dims = ((contracting[:1], contracting[1:]), ((), ()))
    product = lax.dot_general(
        one.dequantize(held), other.dequantize(held), dims, preferred_element_type=held
    )
    return product.astype(dtype)


def _choose(
    quantized: jax.Array | None, by_recipe: Callable[[], jax.Array], plain: Callable[[], jax.Array]
) -> jax.Array:
    if quantized is None:
        return by_recipe()
    return lax.cond(quantized, by_recipe, plain)
