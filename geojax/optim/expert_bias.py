"""The biases that balance experts, beside the weights that an optimizer trains.

In place of a gradient they have the excess of their experts' choices, summed like one over the
step's whole batch (`geojax.models.moe.score_bias`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from geojax.models.parameters import is_score_bias
from geojax.optim.skipped_steps import SkipAwareTransformation


def balance_experts(optimizer: SkipAwareTransformation, rate: float) -> SkipAwareTransformation:
    """Move the bias of every expert by `rate` against the sign of its excess.

    Wang et al. 2024 ("Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
    algorithm 1). All other leaves are `optimizer`'s, which sees gradients of zero for the biases.
    """

    def update(gradients: Any, state: Any, parameters: Any = None, **extra: Any) -> tuple[Any, Any]:
        of_weights = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.zeros_like(leaf) if is_score_bias(path) else leaf, gradients
        )
        updates, state = optimizer.update(of_weights, state, parameters, **extra)
        moved = jax.tree_util.tree_map_with_path(
            lambda path, change, leaf: (
                -rate * jnp.sign(leaf).astype(change.dtype) if is_score_bias(path) else change
            ),
            updates,
            gradients,
        )
        return moved, state

    return SkipAwareTransformation(optimizer.init, update)
