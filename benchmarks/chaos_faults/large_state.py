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
from geojax.optim.optimizer_state import SkipAwareTransformation
from geojax.optim.registry import OPTIMIZERS, MomentSettings, OptimizerEntry


def with_averages(entry: OptimizerEntry, count: int) -> OptimizerEntry:
    """Return an optimizer of the same directions whose state has so many averages of gradients."""

    def directions(settings: MomentSettings, kind_of: KindOf) -> optax.GradientTransformation:
        own = entry.directions(settings, kind_of)

        def init(parameters: Any) -> Any:
            def zeros(parameter: jax.Array) -> jax.Array:
                return jnp.zeros((count, *parameter.shape), parameter.dtype)

            return own.init(parameters), [zeros(leaf) for leaf in jax.tree.leaves(parameters)]

        def update(
            gradients: Any,
            state: Any,
            parameters: Any = None,
            *,
            finite: jax.Array | bool = True,
            **more: Any,
        ) -> tuple[Any, Any]:
            of_own, averages = state
            found, of_own = own.update(gradients, of_own, parameters, finite=finite, **more)

            def mixed(old: jax.Array, shard: jax.Array) -> jax.Array:
                gradient = jax.lax.pmean(shard, tuple(varying_axes(shard)))
                shares = jnp.where(finite, 1 / (2 + jnp.arange(count, dtype=old.dtype)), 0.0)
                return old + shares.reshape(-1, *(1,) * gradient.ndim) * (gradient - old)

            return found, (of_own, list(map(mixed, averages, jax.tree.leaves(gradients))))

        return SkipAwareTransformation(init, update)

    return dataclasses.replace(entry, directions=directions)


if __name__ == "__main__":
    OPTIMIZERS["adamw"] = with_averages(OPTIMIZERS["adamw"], int(sys.argv.pop(1)))
    main()
