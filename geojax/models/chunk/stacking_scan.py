"""A scan whose stacked results are made when it begins, not when the program does."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.models.chunk.layer_io import layer_slice
from geojax.models.parallel.varying import zero_after, zeros_of


def stacking_scan(
    body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, *, reverse: bool = False
) -> tuple[Any, Any]:
    """Run `lax.scan(body, carry, xs)`, with arrays for its results that wait for `carry`.

    `lax.scan` stacks results into a constant array, and XLA for GPUs makes what depends on nothing
    as early as it can: the residuals of a step's last microbatch would be held from the step's
    beginning on. Not differentiable.
    """
    count = len(jax.tree.leaves(xs)[0])
    if count == 1:
        return lax.scan(body, carry, xs, unroll=True)
    traced_once = jax.jit(body, inline=True)
    shapes = jax.eval_shape(lambda: traced_once(carry, layer_slice(xs, 0))[1])
    if not jax.tree.leaves(shapes):
        return lax.scan(traced_once, carry, xs, reverse=reverse)
    carry, zero = zero_after(carry)

    def iteration(state: tuple[Any, Any], each: tuple[jax.Array, Any]) -> Any:
        carry, stacks = state
        index, x = each
        carry, made = traced_once(carry, x)

        def write(stack: jax.Array, leaf: jax.Array) -> jax.Array:
            return lax.dynamic_update_index_in_dim(
                stack, leaf, index, 0, allow_negative_indices=False
            )

        return (carry, jax.tree.map(write, stacks, made)), None

    indices = jnp.arange(count, dtype=jnp.int32)
    start = (carry, zeros_of(shapes, count, zero=zero))
    done: tuple[Any, Any]
    done, _ = lax.scan(iteration, start, (indices, xs), reverse=reverse)
    return done
