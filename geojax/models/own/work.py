"""The work of a model of your own, read off the trace of its forward: matrix products and FLOPs."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from geojax.models.context import ComputeSettings
from geojax.models.own.chunk import own_chunk, own_logits, read_by_own_head
from geojax.models.own.parts import own_parts
from geojax.models.own.settings import OwnModel
from geojax.models.parallel.parallelism import SINGLE_DEVICE, Parallelism


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
    """Trace the forward of a layer; touches no device.

    Experts multiply in loops as long as their tokens are many, which a trace does not know: their
    products are those of equally busy experts.
    """
    dtype = jnp.dtype(jnp.float32)
    chunk = own_chunk(
        model,
        range(model.num_stacked_layers),
        dtype,
        ComputeSettings(),
        dropout_key=None,
        remat="none",
    )

    def forward(weights: Any, x: jax.Array, batch: Any) -> jax.Array:
        functions = chunk.functions
        return functions.layer(weights, x, jnp.int32(0), functions.context(batch))[0]

    shapes = layer_shapes(model, sequences, length, dtype)
    jaxpr = jax.make_jaxpr(forward)(*shapes).jaxpr
    return traced_products(jaxpr, model, sequences * length)


def layer_shapes(
    model: OwnModel, sequences: int, length: int, dtype: jnp.dtype
) -> tuple[Any, jax.ShapeDtypeStruct, dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of a layer's weights, of the stream and of a microbatch, unsharded."""
    stacked = own_parts(model).declarations["layers"]
    weights = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape[1:], dtype), stacked)
    tokens = jax.ShapeDtypeStruct((sequences, length), jnp.int32)
    batch = dict.fromkeys(("tokens", "segment_ids", "positions"), tokens)
    batch["row"] = jax.ShapeDtypeStruct((sequences,), jnp.int32)
    x = jax.ShapeDtypeStruct((sequences, length, model.hidden_size), dtype)
    return weights, x, batch


def traced_products(
    jaxpr: core.Jaxpr, model: OwnModel, tokens: int, parallelism: Parallelism = SINGLE_DEVICE
) -> Products:
    """Return the products of the traced forward of a layer on one rank.

    Args:
        jaxpr: the trace.
        model: the model.
        tokens: tokens of the rank, where ranks of `tensor` do not share positions.
        parallelism: how ranks share a layer.
    """
    ranks = {"tensor": parallelism.tensor, "expert": parallelism.expert, None: 1}
    of_experts = []
    for part in own_parts(model).period:
        choices = next((each.num_experts_per_tok for each in part.of_geojax if each.is_moe), 0)
        for declared in part.declared.values():
            if declared.axes[:1] == ("expert",) and declared.kind == "matrix":
                sizes = zip(declared.shape, declared.axes, strict=True)
                own, inner, columns = (size // ranks[axis] for size, axis in sizes)
                rows = tokens * choices // own  # as many come from other ranks as go there
                of_experts.append(TracedProduct(rows, columns, inner, own))
    traced = _products(jaxpr, 1, without_loops=bool(of_experts))
    return (*traced, *of_experts)


@functools.lru_cache(maxsize=64)
def head_products(model: OwnModel, sequences: int, length: int) -> Products:
    """Trace the forward of the head; touches no device."""
    parts = own_parts(model)
    shapes = jax.tree.map(
        lambda each: jax.ShapeDtypeStruct(each.shape, jnp.float32), parts.declarations
    )
    x = jax.ShapeDtypeStruct((sequences, length, model.hidden_size), jnp.float32)
    read = read_by_own_head(shapes, parts)
    jaxpr = jax.make_jaxpr(functools.partial(own_logits, parts))(read, x).jaxpr
    return tuple(_products(jaxpr, 1, without_loops=False))


def own_flops(model: OwnModel, sequence: int) -> int:
    """Count the FLOPs of one token, forward and backward: three times the forward's products.

    With adapters the products of the model without them count twice, since frozen weights get no
    gradients; attention's scores are among them.
    """
    layers = model.num_stacked_layers * flops(layer_products(model, 1, sequence))
    all_products = layers + flops(head_products(model, 1, sequence))
    frozen = 0
    if model.lora is not None:
        base = model.base
        frozen = base.num_stacked_layers * flops(layer_products(base, 1, sequence))
        frozen += flops(head_products(base, 1, sequence))
    return (3 * all_products - frozen) // sequence


def flops(products: Products) -> int:
    """Sum the FLOPs of products."""
    return sum(2 * each.rows * each.columns * each.inner * each.times for each in products)


def _products(jaxpr: core.Jaxpr, times: int, *, without_loops: bool) -> Iterator[TracedProduct]:
    """Yield the products of a program that runs `times` times; a scan's as often as it runs.

    Those of loops of unknown length count once, or `without_loops` not at all.
    """
    for equation in jaxpr.eqns:
        if without_loops and equation.primitive.name == "while":
            continue
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
                yield from _products(below, inside, without_loops=without_loops)


def _of_dot(shapes: list[Any], dims: Any, times: int) -> TracedProduct:
    (left, _), (batched, _) = dims
    lhs, rhs = shapes
    inner = math.prod(lhs[dim] for dim in left)
    count = math.prod(lhs[dim] for dim in batched)
    rows = math.prod(lhs) // (inner * count)
    columns = math.prod(rhs) // (inner * count)
    return TracedProduct(rows, columns, inner, count * times)
