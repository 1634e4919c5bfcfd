"""Matmuls of linear layers, in the compute dtype or by an FP8 recipe.

    y  = x w       x and w quantized along inputs
    dx = dy w^T    dy and w quantized along outputs
    dw = x^T dy    x and dy quantized along tokens

The backward pass keeps x and w as they came, since x is recomputed more often than kept and w is at
hand again; each matmul quantizes them along the dim that it contracts. A w whose quantization
serves both of its matmuls may come quantized (`geojax.precision.quantized_weight`).

*Per tensor* means per operand of the matmul that one device would run if it held the sequences of
its data-parallel rank and the unsharded model. So the largest magnitude (amax) of an operand is
taken over the ranks of `tensor` and `context` that hold parts of it, and over no others. Sequences
of other data-parallel ranks or microbatches are other tensors, and nothing crosses `dc`. The result
then does not depend on how a layer is sharded, nor on whether sequences are spread over ranks or
microbatches, and ranks wait for no other ranks than they do for the matmul.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from geojax.collectives.axes import to_varying, varying_axes
from geojax.collectives.order import told_apart
from geojax.precision import transformer_engine
from geojax.precision.quantize import largest, quantize
from geojax.precision.quantized_weight import QuantizedWeight, Weight, split_quantized
from geojax.precision.recipes import Format, Recipe

_PRODUCT, _AMAX = "linear_product", "linear_amax"

SAVEABLE_MATMULS = (_PRODUCT, _AMAX)
"""Names of the results of linear layers that remat policies save where they save matmuls."""

AMAX = "amax"
"""Key of a linear layer's [3] magnitudes: in the parameters those of the steps before, in the
gradients those of this step."""

Backend = Literal["reference", "xla", "transformer_engine"]
"""Implementations of FP8 matmuls. The reference is plain JAX, which dequantizes to at least float32
and multiplies there: exact and slow, on any device. The others run on NVIDIA GPUs, by cuBLASLt, for
recipes with a scale per tensor: XLA's own FP8 matmuls, or TransformerEngine's kernels."""


class Axes(NamedTuple):
    """Mesh axes, of more than one rank, over which the operands of one matmul are sharded."""

    x: tuple[str, ...] = ()
    w: tuple[str, ...] = ()
    dy: tuple[str, ...] = ()


UNSHARDED = Axes()
"""Axes of operands that no axis shards."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearMatmul:
    """Matmul of a model's linear layers: in the compute dtype, or by an FP8 recipe on a backend.

    It is a pytree whose only leaf is `quantized`.
    """

    recipe: Recipe | None = dataclasses.field(default=None, metadata={"static": True})
    """FP8 recipe; None: the compute dtype."""
    backend: Backend = dataclasses.field(default="reference", metadata={"static": True})
    """Implementation of the recipe's matmuls."""
    quantized: jax.Array | None = None
    """bool [], true if the current layer follows the recipe; None: it does."""

    def spans(self, layers: int) -> list[tuple[int, "LinearMatmul"]]:
        """Split `layers` layers into consecutive spans with the same matmul: (layers, matmul)."""
        ends = self.recipe.num_bf16_layers_per_end if self.recipe else 0
        middle = max(layers - 2 * ends, 0)
        first = min(ends, layers)
        spans = [(first, NO_FP8), (middle, self), (layers - first - middle, NO_FP8)]
        return [(count, matmul) for count, matmul in spans if count]

    def spans_within(self, chunk: range, layers: int) -> list[tuple[range, "LinearMatmul"]]:
        """Return the part of each span of `layers` layers that lies in `chunk`: (part, matmul)."""
        made, end = [], 0
        for count, matmul in self.spans(layers):
            first, end = end, end + count
            part = range(max(first, chunk.start), min(end, chunk.stop))
            if part:
                made.append((part, matmul))
        return made

    def at_layer(self, index: jax.Array, layers: int) -> "LinearMatmul":
        """Return the matmul of layer `index` of `layers`, an index that is known at run time only.

        The program then chooses by it.
        """
        if self.recipe is None or self.recipe.num_bf16_layers_per_end == 0:
            return self
        ends = self.recipe.num_bf16_layers_per_end
        return dataclasses.replace(self, quantized=(index >= ends) & (index < layers - ends))

    def multiply(
        self, x: jax.Array, w: Weight, amax: jax.Array | None = None, axes: Axes = UNSHARDED
    ) -> jax.Array:
        """Multiply `x` [tokens, inputs] by `w`; see `multiply_each`, whose only part it is."""
        return self.multiply_each((x,), w, amax, axes)[0]

    def multiply_each(
        self,
        parts: Sequence[jax.Array],
        w: Weight,
        amax: jax.Array | None = None,
        axes: Axes = UNSHARDED,
    ) -> tuple[jax.Array, ...]:
        """Multiply parts [tokens, inputs] of a tensor by `w` [inputs, outputs], in their dtype.

        Differentiable (reverse mode) in `parts` and `w`; may be called inside a `shard_map`. The
        gradient of `w` is one product of all parts, and they share a scale. With a recipe sums are
        in at least float32 and results are rounded once.

        Args:
            parts: the activations, in parts.
            w: the weights, of the parts' dtype before they were quantized, if they are; a recipe
                that quantizes them along the contracted dim takes them unquantized.
            amax: float32 [3], for a recipe with a history: the magnitudes of x, w and dy in the
                steps before. In the gradient tree this leaf holds the [3] magnitudes of this rank
                in this step, which are no gradient and must never be summed; so it must vary over
                all axes that x and w vary over.
            axes: the axes over which each part, `w` and the gradients of results are sharded.
        """
        xs, (quantized_w, trained) = tuple(parts), split_quantized(w)
        varying = varying_axes(*xs) | varying_axes(trained)
        if self.recipe is None:
            assert quantized_w is None, "a layer without FP8 takes unquantized weights"
            if len(xs) == 1:
                return (xs[0] @ trained,)
            xs, trained = _to_varying((xs, trained), varying)
            return tuple(map(saveable, _plain_products(xs, trained)))
        assert quantized_w is None or self.quantized is None, (
            "a layer that may follow no recipe takes unquantized weights"
        )
        assert xs[0].dtype == w.dtype, f"activations of {xs[0].dtype}, weights of {w.dtype}"
        assert (amax is None) == (self.recipe.history == 0), (
            "a recipe has amax if and only if it has a history"
        )
        if amax is not None:
            assert varying_axes(amax) >= varying, (
                "amax varies over all axes of its operands, since it must not be summed"
            )
            varying = varying_axes(amax)
        xs, trained, quantized_w = _to_varying((xs, trained, quantized_w), varying)
        how = _How(self.recipe, self.backend, axes)
        made = _products(how, xs, trained, quantized_w, amax, self.quantized)
        return tuple(map(saveable, made))


def _to_varying(tree: Any, axes: frozenset[str]) -> Any:
    return jax.tree.map(functools.partial(to_varying, axes=sorted(axes)), tree)


def saveable(product: jax.Array) -> jax.Array:
    """Name the result of a linear layer as one of `SAVEABLE_MATMULS`."""
    return checkpoint_name(product, _PRODUCT)


NO_FP8 = LinearMatmul()
"""Matmul in the compute dtype."""


class _How(NamedTuple):
    recipe: Recipe
    backend: Backend
    axes: Axes


_Parts = tuple[jax.Array, ...]
_Made = TypeVar("_Made")


def _plain_forward(xs: _Parts, w: jax.Array) -> _Parts:
    return tuple(x @ own for x, own in zip(xs, told_apart(w, len(xs)), strict=True))


def _plain_gradients(kept: tuple[_Parts, jax.Array], dys: _Parts) -> tuple[_Parts, jax.Array]:
    xs, w = kept
    dxs = tuple(dy @ own.T for dy, own in zip(dys, told_apart(w, len(dys)), strict=True))
    return dxs, _joined(xs).T @ _joined(dys)


_plain_products = jax.custom_vjp(_plain_forward)
_plain_products.defvjp(lambda xs, w: (_plain_forward(xs, w), (xs, w)), _plain_gradients)


def _joined(parts: _Parts) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(
    how: _How,
    xs: _Parts,
    w: jax.Array,
    quantized_w: QuantizedWeight | None,
    amax: jax.Array | None,
    quantized: jax.Array | None,
) -> _Parts:
    return _forward(how, xs, w, quantized_w, amax, quantized)[0]


class _Residuals(NamedTuple):
    xs: _Parts
    w: Weight
    amax: jax.Array | None
    quantized: jax.Array | None
    amax_x: jax.Array | None
    amax_w: jax.Array | None


def _forward(
    how: _How,
    xs: _Parts,
    w: jax.Array,
    quantized_w: QuantizedWeight | None,
    amax: jax.Array | None,
    quantized: jax.Array | None,
) -> tuple[_Parts, _Residuals]:
    of_x = _amax_of_scale(xs, how.axes.x, how.recipe.activation, amax, 0)
    of_w = None
    if quantized_w is None:
        of_w = _amax_of_scale((w,), how.axes.w, how.recipe.weight, amax, 1)
    kept = _Residuals(xs, w if quantized_w is None else quantized_w, amax, quantized, of_x, of_w)

    def by_recipe() -> _Parts:
        weight, form = _weight(how, kept), how.recipe.activation
        return tuple(_dot(how, _rounding(how, x, form, of_x), weight, (1, 0), x.dtype) for x in xs)

    return _choose(quantized, by_recipe, lambda: tuple(x @ w for x in xs)), kept


def _backward(
    how: _How, kept: _Residuals, dys: _Parts
) -> tuple[_Parts, jax.Array, None, jax.Array | None, None]:
    xs, w, recipe, dtype = kept.xs, kept.w, how.recipe, kept.xs[0].dtype
    of_dy = _amax_of_scale(dys, how.axes.dy, recipe.gradient, kept.amax, 2)

    def round_dy(dy: jax.Array) -> _Rounding:
        return _rounding(how, dy, recipe.gradient, of_dy)

    # Once for both matmuls, unless each has yet to choose, or takes other parts.
    shared = kept.quantized is None and len(dys) == 1
    once = round_dy(dys[0]) if shared else None

    def dx_by_recipe() -> _Parts:
        weight = _weight(how, kept)
        return tuple(_dot(how, once or round_dy(dy), weight, (1, 1), dtype) for dy in dys)

    def dw_by_recipe() -> jax.Array:
        left = _rounding(how, _joined(xs), recipe.activation, kept.amax_x)
        return _dot(how, left, once or round_dy(_joined(dys)), (0, 0), dtype)

    def plain_dx() -> _Parts:
        assert not isinstance(w, QuantizedWeight), (
            "a layer that may follow no recipe has unquantized weights"
        )
        return tuple(dy @ w.T for dy in dys)

    # Two choices, so that a pipeline can put off the one and not the other.
    dx = _choose(kept.quantized, dx_by_recipe, plain_dx)
    dw = _choose(kept.quantized, dw_by_recipe, lambda: _joined(xs).T @ _joined(dys))
    observed = None if kept.amax is None else _largest_operands(xs, w, dys)
    return dx, dw, None, observed, None


_products.defvjp(_forward, _backward)


def _amax_of_scale(
    parts: _Parts, axes: tuple[str, ...], form: Format, amax: jax.Array | None, operand: int
) -> jax.Array | None:
    """Return the amax that sets the scale of a tensor; None where blocks have scales."""
    if form.along is not None:
        return None
    if amax is not None:
        return amax[operand]
    return largest_over(_largest_of(parts), axes)


def _largest_of(parts: _Parts) -> jax.Array:
    return functools.reduce(jnp.maximum, map(largest, parts))


def largest_over(amax: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Take the maximum of each element over the ranks of `axes`."""
    # (What is the same along an axis is the largest there already.)
    parts = tuple(axis for axis in axes if axis in varying_axes(amax))
    return checkpoint_name(lax.pmax(amax, parts), _AMAX) if parts else amax


def largest_each(x: jax.Array, w: Weight, dy: jax.Array) -> jax.Array:
    """Stack the largest magnitudes of a matmul's operands on this rank, float32 [3].

    For a weight that came quantized it is that of the part that this rank has quantized.
    """
    return _largest_operands((x,), w, (dy,))


def _largest_operands(xs: _Parts, w: Weight, dys: _Parts) -> jax.Array:
    of_w = w.largest if isinstance(w, QuantizedWeight) else largest(w)
    assert of_w is not None, "a weight quantized for a recipe with a history has its amax"
    return jnp.stack([_largest_of(xs), of_w, _largest_of(dys)])


def accumulate(sums: Any, new: Any) -> Any:
    """Add gradients `new` to `sums`, in the dtypes of `sums`; of magnitudes keep the larger.

    Args:
        sums: a tree like the parameters; leaves with the key `AMAX` hold magnitudes.
        new: a tree of the same structure.
    """

    def one(path: tuple[Any, ...], total: jax.Array, leaf: jax.Array) -> jax.Array:
        leaf = leaf.astype(total.dtype)
        return jnp.maximum(total, leaf) if is_amax(path) else total + leaf

    return jax.tree_util.tree_map_with_path(one, sums, new)


def is_amax(path: tuple[Any, ...]) -> bool:
    """Return True if the leaf at `path` of a tree like the parameters holds magnitudes."""
    return getattr(path[-1], "key", None) == AMAX if path else False


_Rounding = Callable[[int], Any]
"""Function from the dim that a matmul contracts to the FP8 matrix as the backend holds it."""


def _rounding(how: _How, x: jax.Array, form: Format, amax: jax.Array | None) -> _Rounding:
    if how.backend == "transformer_engine":
        return transformer_engine.quantize(x, form, amax)
    return lambda contracting: quantize(x, form, contracting, amax)


def _weight(how: _How, kept: _Residuals) -> _Rounding:
    if not isinstance(kept.w, QuantizedWeight):
        return _rounding(how, kept.w, how.recipe.weight, kept.amax_w)
    quantized_w = kept.w.quantized
    if how.backend == "transformer_engine":
        return transformer_engine.from_quantized(quantized_w, kept.w.dtype)
    return lambda contracting: quantized_w


def _dot(
    how: _How, left: _Rounding, right: _Rounding, contracting: tuple[int, int], dtype: jnp.dtype
) -> jax.Array:
    """Contract one dim of each of two matrices, summed in at least float32.

    XLA for GPUs sees FP8 numbers that are multiplied by a scale and then with each other, and lets
    cuBLASLt do all of it: the result never exists unscaled in `dtype`.
    """
    one, other = left(contracting[0]), right(contracting[1])
    if how.backend == "transformer_engine":
        return transformer_engine.multiply(one, other, contracting).astype(dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    holding_dtype = wide if how.backend == "reference" else dtype
    dims = ((contracting[:1], contracting[1:]), ((), ()))
    product = lax.dot_general(
        one.dequantize(holding_dtype),
        other.dequantize(holding_dtype),
        dims,
        preferred_element_type=holding_dtype,
    )
    return product.astype(dtype)


def _choose(
    quantized: jax.Array | None, by_recipe: Callable[[], _Made], unquantized: Callable[[], _Made]
) -> _Made:
    if quantized is None:
        return by_recipe()
    return lax.cond(quantized, by_recipe, unquantized)


def attach_amax(weights: Any, amax: Any) -> Any:
    """Put `amax`, a tree of `AMAX` leaves, beside the kernels of the layers' `weights`."""
    if amax is None or AMAX in amax:
        return weights | (amax or {})
    return weights | {name: attach_amax(weights[name], below) for name, below in amax.items()}


def detach_amax(gradients: Any) -> tuple[Any, Any]:
    """Take gradients of weights and the amax (None: there is none) apart again."""
    weights, amax = {}, {}
    for name, below in gradients.items():
        if name == AMAX:
            amax[name] = below
        elif isinstance(below, dict):
            weights[name], inside = detach_amax(below)
            if inside:
                amax[name] = inside
        else:
            weights[name] = below
    return weights, amax or None
