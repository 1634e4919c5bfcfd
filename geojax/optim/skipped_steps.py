"""The rule for a step whose loss or gradient is not finite: parameters and state stay as they are.

Any optax transformation would store NaN in its moments and count the step. `keep_on_skipped_steps`
makes one that keeps its state, bit for bit, counters included; `apply_updates` keeps parameters.
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
