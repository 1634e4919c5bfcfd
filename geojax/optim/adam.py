"""Adam on shards, with moments that are updated in place."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """Adam's direction (Kingma and Ba, arXiv 1412.6980), and its moments.

    The formula and the state are those of `optax.scale_by_adam`. But each new moment is computed
    once, and the direction reads that one. Left to itself, a compiler computes moments again where
    it computes the weights, from the old ones, so that these cannot be overwritten: XLA for CPUs
    then keeps a copy of both, 8 bytes a parameter.

    `update` takes `finite=`, a bool: where it is False the moments stay as they are. (To choose
    between new and old ones afterwards would be another reader of the old ones.)
    """

    def init(parameters: Any) -> optax.ScaleByAdamState:
        first, second = (jax.tree.map(jnp.zeros_like, parameters) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), first, second)

    def update(
        gradients: Any,
        state: optax.ScaleByAdamState,
        parameters: Any = None,
        *,
        finite: jax.Array | bool = True,
        **_: Any,
    ) -> tuple[Any, optax.ScaleByAdamState]:
        count = state.count + 1

        def moments(gradient: jax.Array, first: jax.Array, second: jax.Array) -> Any:
            new = (
                beta1 * first + (1 - beta1) * gradient,
                beta2 * second + (1 - beta2) * jnp.square(gradient),
            )
            kept = [jnp.where(finite, *pair) for pair in zip(new, (first, second), strict=True)]
            return tuple(jax.lax.optimization_barrier(kept))

        def direction(first: jax.Array, second: jax.Array) -> jax.Array:
            steps = count.astype(first.dtype)
            unbiased = first / (1 - beta1**steps), second / (1 - beta2**steps)
            return unbiased[0] / (jnp.sqrt(unbiased[1]) + epsilon)

        pairs = jax.tree.map(moments, gradients, state.mu, state.nu)
        first, second = jax.tree.transpose(
            jax.tree.structure(gradients), jax.tree.structure((0, 0)), pairs
        )
        directions = jax.tree.map(direction, first, second)
        return directions, optax.ScaleByAdamState(count, first, second)

    return optax.GradientTransformationExtraArgs(init, update)
