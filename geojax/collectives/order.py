"""The order of a program's collectives where its data do not say it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from geojax.runtime.platform import CPU, GPU

Tree = TypeVar("Tree")


def after(tree: Tree, token: jax.Array) -> Tree:
    """Make what is computed of `tree`, collectives too, begin when `token` has been computed.

    The values stay the same, and on platforms that do not need it (`orders_collectives`) this does
    nothing. XLA's CPU runtime issues the collectives of one computation in the same order on every
    device, but a `while` loop counts as issued once its first iteration is. Devices may therefore
    interleave the collectives of two independent loops differently and deadlock. Making `tree`
    depend on `token` fixes one order.

    Args:
        tree: arrays.
        token: an array of numbers, not an empty one.
    """
    return jax.tree.map(lambda leaf: _after_p.bind(leaf, token), tree)


def held_until(tree: Tree, token: jax.Array) -> Tree:
    """Do as `after`, on every platform: XLA for GPUs would place what reads a message before it.

    Of two results that do not depend on each other it computes any one first, and awaits a message
    where its first reader is.
    """
    return jax.tree.map(lambda leaf: held_p.bind(leaf, token), tree)


@jax.custom_vjp
def together_backwards(tree: Tree) -> Tree:
    """Return `tree`; on GPUs what is computed of any of its cotangents begins when all of them are.

    A message that is one of them then travels while the others are computed, which XLA would do
    later, when nothing is left that could hide it.
    """
    return tree


together_backwards.defvjp(lambda tree: (tree, None), lambda _, cotangents: (together(cotangents),))


def together(tree: Tree) -> Tree:
    """Return `tree`; on GPUs what is computed of any leaf begins when all of them are there."""
    leaves, structure = jax.tree.flatten(tree)
    made: Tree = jax.tree.unflatten(structure, together_p.bind(*leaves))
    return made


def in_turn(
    collective: Callable[[jax.Array], jax.Array],
    parts: Sequence[jax.Array],
    *,
    made_together: bool,
) -> tuple[jax.Array, ...]:
    """Send `parts` by `collective` one after another.

    On GPUs a part is sent when the one before has arrived: a scheduler that may choose starts all
    of them together, when what makes the last is done. Not differentiable.

    Args:
        collective: sends a part.
        parts: what is sent.
        made_together: the parts are there at the same time. What reads a result may then wait for
            the next part too, without which XLA drops the order of what it calls by other names.
    """
    made: list[jax.Array] = []
    for part in parts:
        if made:
            part, last = _turn_p.bind(part, made[-1])
            if made_together:
                made[-1] = last
        made.append(collective(part))
    return tuple(made)


def told_apart(x: jax.Array, count: int) -> list[jax.Array]:
    """Return `x` so many times, as arrays that XLA for GPUs takes for different ones.

    It otherwise makes one product of some that read the same matrix, and all wait for the last of
    their operands. Not differentiable.
    """
    made = [x]
    while len(made) < count:
        made += apart_p.bind(made[-1])  # two of the same array would be one again
    return made


def token_of(tree: Any) -> jax.Array:
    """Return a number that is known only when all arrays of `tree` are."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    return functools.reduce(jnp.add, map(_number, leaves))


def _number(leaf: jax.Array) -> jax.Array:
    number = leaf.ravel()[0].astype(jnp.float32)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        number = jnp.log(number)  # XLA knows that an integer is never NaN
    return number


def barrier(tree: Tree) -> Tree:
    """Make what is computed of any leaf of `tree` begin when all leaves have been computed.

    A `lax.optimization_barrier` under which each leaf keeps the axes that it varies over.
    """
    leaves, structure = jax.tree.flatten(tree)
    passed: Tree = jax.tree.unflatten(structure, barrier_p.bind(*leaves))
    return passed


def _identity(name: str, *, waits_on: str | None) -> Primitive:
    """Make a primitive that returns its operands, when all are there on a platform; None: on any.

    Each result keeps the axes that its operand varies over.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *leaves: leaves)
    primitive.def_abstract_eval(lambda *avals: avals)
    waits = mlir.lower_fun(lambda *leaves: lax.optimization_barrier(leaves), multiple_results=True)
    if waits_on is not None:
        mlir.register_lowering(primitive, lambda context, *leaves: leaves)
    mlir.register_lowering(primitive, waits, platform=waits_on)
    return primitive


barrier_p = _identity("barrier", waits_on=None)
"""`barrier`."""

together_p = _identity("together", waits_on=GPU.name)
"""`together`, which halves of a split backward are not."""

_turn_p = _identity("turn", waits_on=GPU.name)
apart_p = _identity("apart", waits_on=GPU.name)


def _depend(x: jax.Array, token: jax.Array) -> jax.Array:
    number = jnp.nan_to_num(token.ravel()[0].astype(jnp.float32))
    return jnp.where(jnp.isnan(number), jnp.zeros_like(x), x)  # never NaN, which XLA cannot know


def _dependence(name: str, *, waits_on: Sequence[str] | None) -> Primitive:
    """Make a primitive that returns its first operand, on some platforms when the second is there.

    `waits_on` names them; None: on all.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x, token: x)
    primitive.def_abstract_eval(lambda x, token: x)
    waits = mlir.lower_fun(_depend, multiple_results=False)
    mlir.register_lowering(primitive, waits if waits_on is None else lambda context, x, token: [x])
    for platform in waits_on or ():
        mlir.register_lowering(primitive, waits, platform=platform)
    return primitive


held_p = _dependence("held", waits_on=None)
_after_p = _dependence(
    "after", waits_on=[each.name for each in (CPU, GPU) if each.orders_collectives]
)
