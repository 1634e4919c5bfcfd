"""`geojax` with a state that is large beside the sums of a step: AdamW that also carries averages.

    python large_state.py AVERAGES train run.yaml ...

Each average is one of the gradients, as large as the weights, and read by nothing. So the losses
are those of AdamW. AdamW's own state is three times as large as the sums of a step in fp32.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

from geojax.cli.main import main
from geojax.collectives.axes import varying_axes
from geojax.models.declaration import KindOf
from geojax.optim.optimizer_state import keep_on_skipped_steps
from geojax.optim.registry import OPTIMIZERS, MomentSettings, OptimizerEntry


def carry_averages(count: int) -> optax.GradientTransformation:
    """Keep so many averages of the gradients, which pass unchanged; for a site of one device."""

    def init(parameters: Any) -> list[jax.Array]:
        leaves = jax.tree.leaves(parameters)
        return [jnp.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves]

    def mixed(old: jax.Array, shard: jax.Array) -> jax.Array:
        gradient = jax.lax.pmean(shard, tuple(varying_axes(shard)))
        shares = 1 / (2 + jnp.arange(count, dtype=old.dtype))
        return old + shares.reshape(-1, *(1,) * gradient.ndim) * (gradient - old)

    def update(gradients: Any, averages: list[jax.Array], _: Any = None) -> tuple[Any, Any]:
        return gradients, list(map(mixed, averages, jax.tree.leaves(gradients)))

    return optax.GradientTransformation(init, update)


def with_averages(entry: OptimizerEntry, count: int) -> OptimizerEntry:
    """Return an optimizer of the same directions whose state has so many averages of gradients."""

    def directions(settings: MomentSettings, kind_of: KindOf) -> optax.GradientTransformation:
        return keep_on_skipped_steps(carry_averages(count), entry.directions(settings, kind_of))

    return dataclasses.replace(entry, directions=directions)


if __name__ == "__main__":
    OPTIMIZERS["adamw"] = with_averages(OPTIMIZERS["adamw"], int(sys.argv.pop(1)))
    main()
