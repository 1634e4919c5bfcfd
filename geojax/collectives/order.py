"""The order of a program's parts on CPUs, where its data do not say it."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

Tree = TypeVar("Tree")


def after(tree: Tree, token: jax.Array) -> Tree:
    """`tree`; what is computed of it, collectives too, begins when `token` has been computed.

    On CPUs `tree` is made to depend on `token`, with the same values; elsewhere this does nothing.
    XLA's runtime for CPUs begins the collectives of one computation in the same order on all
    devices, but a loop has begun when its first turn has: of the collectives in a loop and those in
    or behind another that does not wait for it, one device may begin the one first and another the
    other, and simulated devices then wait for each other for ever.

    Args:
        tree: arrays.
        token: an array of numbers, not an empty one.
    """
    return jax.tree.map(lambda leaf: _after_p.bind(leaf, token), tree)


_after_p = Primitive("after")


def _type(aval: Any, _: Any) -> Any:
    return aval


def _depend(x: jax.Array, token: jax.Array) -> jax.Array:
    number = jnp.nan_to_num(token.ravel()[0].astype(jnp.float32))
    return jnp.where(jnp.isnan(number), jnp.zeros_like(x), x)  # it never is, but who knows that?


_after_p.def_abstract_eval(_type)
mlir.register_lowering(_after_p, lambda context, x, token: [x])
mlir.register_lowering(_after_p, mlir.lower_fun(_depend, multiple_results=False), platform="cpu")
