"""Clipping by the global norm of gradients that live in shards.

`optax.clip_by_global_norm` inside a manual `shard_map` clips each rank by the norm of its own shard
and would count a replicated leaf once for every rank. Here the varying-axes types tell which leaves
are sharded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from geojax.collectives import all_reduce
from geojax.collectives.axes import varying_axes
from geojax.models.moe.router import is_score_bias
from geojax.sharding.leaf_layouts import LeafLayout


def global_norm(gradients: Any, layouts: Any = None) -> jax.Array:
    """Return the Euclidean norm of the whole gradient, of which each rank holds parts.

    What experts' biases have in a gradient's place (`geojax.optim.optimizer`) is none of it.

    Call it inside a `shard_map` with `check_vma=True`: a leaf is taken to be sharded over axes that
    its type says it varies over (padding is zero and adds nothing), and equal along the others. The
    result is the same number on every rank.

    Args:
        gradients: this rank's shards.
        layouts: the `LeafLayout` of each; what two stages of a pipeline hold counts once. None:
            there is no pipeline.
    """
    if layouts is not None:
        gradients = jax.tree.map(_counted_once, gradients, layouts)
    sums: dict[tuple[str, ...], list[jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        if is_score_bias(path):
            continue
        axes = tuple(sorted(varying_axes(leaf)))
        sums.setdefault(axes, []).append(jnp.sum(jnp.square(leaf)))
    squares = []
    for axes, values in sums.items():
        in_site = tuple(axis for axis in axes if axis != "dc")
        square = all_reduce(jnp.sum(jnp.stack(values)), in_site, ())
        squares.append(all_reduce(square, (), "dc") if "dc" in axes else square)
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _counted_once(shard: jax.Array, leaf_layout: LeafLayout) -> jax.Array:
    return shard if leaf_layout.stages is None else leaf_layout.stages.count_once(shard)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale the sharded gradients so that their `global_norm` is at most `max_norm`.

    As in Pascanu et al. (arXiv 1211.5063): a gradient within the norm is left exactly as it is.
    `update` takes `norm=`, the result of `global_norm`, from a caller who has it already: that
    saves the reduction. With a pipeline it is needed, since only the layouts tell what two stages
    hold.
    """

    def update(
        updates: Any, state: Any, parameters: Any = None, *, norm: jax.Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = global_norm(updates) if norm is None else norm
        scale = jnp.where(norm > max_norm, max_norm / norm, jnp.ones_like(norm))
        return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda parameters: optax.EmptyState(), update)
