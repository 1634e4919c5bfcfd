"""Products of a stream that is gathered for them in parts, and gathered again for their gradients.

    forward    part 0:  gather ─► products
               part 1:            gather ─► products
    backward   part 0:  products ─► scatter
               part 1:              products ─► scatter    gather all ─► gradients of the kernels

What is gathered is not kept, as under selective rematerialization. In the backward it is needed for
the gradients of the kernels alone, so it travels beside the products that the input's gradient
waits for. All positions are gathered in one message, in their order: parts would have to be put
together in memory.

Shapes: B batch, S sequence, H hidden, F outputs.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from geojax.collectives.axes import to_varying, varying_axes
from geojax.collectives.order import together, told_apart
from geojax.models.parallel.tensor import (
    gather_parts,
    gather_positions,
    join_positions,
    join_stream,
    scatter_parts,
)

_Parts = tuple[jax.Array, ...]


def entered_products(
    parts: Sequence[jax.Array], kernels: Sequence[jax.Array], *, at_once: bool
) -> list[_Parts]:
    """Copy parts of the stream to all ranks of `tensor`, and multiply each by all `kernels`.

    Args:
        parts: [B, S / tensor / chunks, H] each.
        kernels: [H, F] each, this rank's parts.
        at_once: see `geojax.models.parallel.tensor.enter_in_parts`.

    Returns:
        For each kernel the product of each part, [B, S / chunks, F].
    """
    axes = sorted(varying_axes(*parts) | varying_axes(*kernels))
    parts, kernels = jax.tree.map(
        functools.partial(to_varying, axes=axes), (tuple(parts), tuple(kernels))
    )
    return list(_products(at_once, parts, kernels))


def _forward(at_once: bool, parts: _Parts, kernels: _Parts) -> tuple[_Parts, ...]:
    entered = gather_parts(parts, at_once=at_once)
    return tuple(
        tuple(map(_multiply, entered, told_apart(kernel, len(entered)))) for kernel in kernels
    )


def _gradients(
    at_once: bool, kept: tuple[_Parts, _Parts], cotangents: tuple[_Parts, ...]
) -> tuple[_Parts, _Parts]:
    parts, kernels = kept
    # Not before the first cotangent: others travel until then that the products wait for.
    (first, *others), *more = cotangents
    stream, first = together((join_stream(parts), first))
    cotangents = ((first, *others), *more)
    of_kernels = [
        tuple(map(_multiply, own, (each.T for each in told_apart(kernel, len(own)))))
        for own, kernel in zip(cotangents, kernels, strict=True)
    ]
    of_parts = [functools.reduce(jnp.add, own) for own in zip(*of_kernels, strict=True)]
    entered = gather_positions(stream)
    ranks = entered.shape[1] // stream.shape[1]
    gradients = [_rows(entered).T @ _rows(join_positions(own, ranks)) for own in cotangents]
    return together((scatter_parts(of_parts), tuple(gradients)))


_products = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_products.defvjp(
    lambda at_once, parts, kernels: (_forward(at_once, parts, kernels), (parts, kernels)),
    _gradients,
)


def _multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return (_rows(x) @ kernel).reshape(*x.shape[:-1], -1)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])
