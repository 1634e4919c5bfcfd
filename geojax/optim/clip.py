"""Clipping by the global norm of gradients that live in shards.

`optax.clip_by_global_norm` inside a manual `shard_map` clips each rank by the norm of its own shard
and would count a replicated leaf once for every rank. Here the axes are explicit.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax


def global_norm(gradients: Any, axes: Sequence[str]) -> jax.Array:
    """The Euclidean norm of the whole gradient, of which each rank on `axes` holds a shard.

    Every leaf must be sharded over all of `axes` (padding is zero and adds nothing) and be equal
    along the other axes. The result is the same number on every rank.
    """
    leaves = jax.tree.leaves(gradients)
    squares = [jnp.sum(jnp.square(leaf)) for leaf in leaves]
    return jnp.sqrt(jax.lax.psum(jnp.sum(jnp.stack(squares)), tuple(axes)))


def clip_by_global_norm(
    max_norm: float, axes: Sequence[str]
) -> optax.GradientTransformationExtraArgs:
    """Scale the sharded gradients so that the norm over `axes` is at most `max_norm`.

    As in Pascanu et al. (arXiv 1211.5063): a gradient within the norm is left exactly as it is.
    `update` takes `norm=`, the result of `global_norm`, from a caller who has it already: that
    saves the reduction.
    """

    def update(
        updates: Any, state: Any, parameters: Any = None, *, norm: jax.Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = global_norm(updates, axes) if norm is None else norm
        scale = jnp.where(norm > max_norm, max_norm / norm, jnp.ones_like(norm))
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda parameters: optax.EmptyState(), update)
