"""Moments that are stored in fewer bits than they are computed in."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def store_moments_in(
    dtype: Any, transformation: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Store the state of a transformation in `dtype`; None leaves it as it is.

    It is computed in the dtype of the gradients, and rounded when it is stored.
    """
    if dtype is None:
        return transformation
    within = optax.with_extra_args_support(transformation)

    def update(gradients: Any, state: Any, parameters: Any = None, **extra: Any) -> tuple[Any, Any]:
        wide = widen(state, dtype, gradients)
        updates, new_state = within.update(gradients, wide, parameters, **extra)
        return updates, narrow(new_state, dtype)

    return optax.GradientTransformationExtraArgs(
        lambda parameters: narrow(within.init(parameters), dtype), update
    )


def narrow(state: Any, dtype: Any) -> Any:
    """Cast the moments of a state to `dtype`, if there is one, and leave its numbers."""
    if dtype is None:
        return state
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_moment(leaf) else leaf, state)


def widen(state: Any, dtype: Any, gradients: Any) -> Any:
    """Invert `narrow`: cast moments to the dtype of the gradients."""
    if dtype is None:
        return state
    wide = optax.tree.dtype(gradients, "highest")
    return jax.tree.map(lambda leaf: leaf.astype(wide) if _is_moment(leaf) else leaf, state)


def _is_moment(leaf: Any) -> bool:
    return leaf.ndim > 0 and jnp.issubdtype(leaf.dtype, jnp.floating)
