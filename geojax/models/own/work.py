"""The work of a model of your own, read off the trace of its forward: matrix products and FLOPs."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from geojax.models.chunk.layer_scan import Layer
from geojax.models.chunk.remat import Remat
from geojax.models.context import ComputeSettings
from geojax.models.own.chunk import own_chunk, own_logits, read_by_own_head
from geojax.models.own.parts import own_parts
from geojax.models.own.settings import OwnModel


class TracedProduct(NamedTuple):
    """Products [rows, inner] x [inner, columns], computed `times` times."""

    rows: int
    columns: int
    inner: int
    times: int


Products: TypeAlias = tuple[TracedProduct, ...]
"""The matrix products of a forward."""


@functools.lru_cache(maxsize=64)
def layer_products(model: OwnModel, sequences: int, length: int) -> Products:
    """Trace the forward of a layer; touches no device."""
    layer = traced_layer(model, sequences, length, "none", jnp.dtype(jnp.float32))
    return _work(layer.forward, layer.weights, layer.x, layer.batch)


class TracedLayer(NamedTuple):
    """A layer, and what it is called with as shapes."""

    function: Layer
    context: Callable[[Any], Any]
    weights: Any
    x: jax.ShapeDtypeStruct
    batch: dict[str, jax.ShapeDtypeStruct]

    def again(self, weights: Any, batch: Any) -> tuple[Any, jax.Array, Any]:
        """Return all that the layer reads beside the stream."""
        return weights, jnp.int32(0), self.context(batch)

    def forward(self, weights: Any, x: jax.Array, batch: Any) -> jax.Array:
        """Compute the stream after the layer."""
        weights, number, context = self.again(weights, batch)
        return self.function(weights, x, number, context)[0]


def traced_layer(
    model: OwnModel, sequences: int, length: int, remat: Remat, dtype: jnp.dtype
) -> TracedLayer:
    """Return a layer with shapes of a microbatch; touches no device."""
    chunk = own_chunk(
        model,
        range(model.num_stacked_layers),
        dtype,
        ComputeSettings(),
        dropout_key=None,
        remat=remat,
    )
    stacked = own_parts(model).declarations["layers"]
    weights = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape[1:], dtype), stacked)
    tokens = jax.ShapeDtypeStruct((sequences, length), jnp.int32)
    rows = jax.ShapeDtypeStruct((sequences,), jnp.int32)
    batch = {"tokens": tokens, "segment_ids": tokens, "positions": tokens, "row": rows}
    x = jax.ShapeDtypeStruct((sequences, length, model.hidden_size), dtype)
    return TracedLayer(chunk.functions.layer, chunk.functions.context, weights, x, batch)


@functools.lru_cache(maxsize=64)
def head_products(model: OwnModel, sequences: int, length: int) -> Products:
    """Trace the forward of the head; touches no device."""
    parts = own_parts(model)
    shapes = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, jnp.float32), parts.declarations
    )
    return _work(
        functools.partial(own_logits, parts),
        read_by_own_head(shapes, parts),
        jax.ShapeDtypeStruct((sequences, length, model.hidden_size), jnp.float32),
    )


def own_flops(model: OwnModel, sequence: int) -> int:
    """Count the FLOPs of one token, forward and backward: three times the forward's products."""
    layers = model.num_stacked_layers * flops(layer_products(model, 1, sequence))
    return 3 * (layers + flops(head_products(model, 1, sequence))) // sequence


def flops(products: Products) -> int:
    """Sum the FLOPs of products."""
    return sum(2 * each.rows * each.columns * each.inner * each.times for each in products)


def _work(function: Any, *arguments: Any) -> Products:
    return tuple(_products(jax.make_jaxpr(function)(*arguments).jaxpr, 1))


def _products(jaxpr: core.Jaxpr, times: int) -> Iterator[TracedProduct]:
    """Yield the products of a program that runs `times` times; a loop's as often as it runs."""
    for equation in jaxpr.eqns:
        shapes = [getattr(each.aval, "shape", ()) for each in equation.invars]
        if equation.primitive.name == "dot_general":
            yield _of_dot(shapes, equation.params["dimension_numbers"], times)
        elif equation.primitive.name == "conv_general_dilated":
            out = getattr(equation.outvars[0].aval, "shape", ())
            dims = equation.params["dimension_numbers"]
            outputs = shapes[1][dims.rhs_spec[0]]
            inner = math.prod(shapes[1]) // outputs
            yield TracedProduct(math.prod(out) // outputs, outputs, inner, times)
        else:
            inside = times * equation.params.get("length", 1)
            for below in core.jaxprs_in_params(equation.params):
                yield from _products(below, inside)


def _of_dot(shapes: list[Any], dims: Any, times: int) -> TracedProduct:
    (left, _), (batched, _) = dims
    lhs, rhs = shapes
    inner = math.prod(lhs[dim] for dim in left)
    count = math.prod(lhs[dim] for dim in batched)
    rows = math.prod(lhs) // (inner * count)
    columns = math.prod(rhs) // (inner * count)
    return TracedProduct(rows, columns, inner, count * times)
