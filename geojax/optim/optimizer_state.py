"""Optimizer state of any optax transformation: kept on a skipped step, and stored in fewer bits.

A step whose loss or gradient is not finite is skipped: parameters and state stay as they are. Any
optax transformation would store NaN in its moments and count the step. `keep_on_skipped_steps`
makes one that keeps its state, bit for bit, counters included; `apply_updates` keeps parameters.

`store_moments_in` makes a transformation whose moments have fewer bits than they are computed in.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax


class SkipAwareTransformation(optax.GradientTransformationExtraArgs):
    """A transformation whose `update` takes `finite=` and keeps its state where that is False."""


def keep_on_skipped_steps(
    *transformations: optax.GradientTransformation,
) -> SkipAwareTransformation:
    """Chain transformations, each of which keeps its state on a step that is not finite.

    The state has the structure that `optax.chain` gives it (of a single transformation its own).
    The new state is chosen from both, which may cost a copy of the old one for the time of the
    update; a transformation that is aware itself is left to keep its state in place.
    """
    aware = [_aware(transformation) for transformation in transformations]
    if len(aware) == 1:
        return aware[0]
    return SkipAwareTransformation(*optax.chain(*aware))


def _aware(transformation: optax.GradientTransformation) -> SkipAwareTransformation:
    if isinstance(transformation, SkipAwareTransformation):
        return transformation
    within = optax.with_extra_args_support(transformation)

    def update(
        gradients: Any,
        state: Any,
        parameters: Any = None,
        *,
        finite: jax.Array | bool = True,
        **extra: Any,
    ) -> tuple[Any, Any]:
        updates, new_state = within.update(gradients, state, parameters, **extra)
        return updates, select(finite, new_state, state)

    return SkipAwareTransformation(within.init, update)


def apply_updates(parameters: Any, updates: Any, finite: jax.Array | bool) -> Any:
    """Add the updates to the parameters; where `finite` is False they stay bit for bit."""
    return select(finite, optax.apply_updates(parameters, updates), parameters)


def select(finite: jax.Array | bool, new: Any, old: Any) -> Any:
    """Choose the leaves of `new` on a finite step, else those of `old`."""
    return jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)


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
