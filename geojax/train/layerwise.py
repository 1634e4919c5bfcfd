"""Gradients that are reduced, and weights that are gathered, one layer at a time.

The sources and sinks of `geojax.models.layer_scan` for a state in shards. Each message is issued in
the turn of a layer whose computation does not wait for it, and what it brings is used later:

    forward    turn l     compute layer l          gather the weights of layer l+1
    backward   turn l     compute layer l          gather the weights of layer l-1
                                                   reduce the gradient of layer l+1

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".)
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.models.layer_scan import add_at, layer_slice
from geojax.models.parameters import Parameters
from geojax.models.varying import zeros_of
from geojax.train.plan import StepPlan
from geojax.train.weights import gather_weights, reduce_gradients, scatter_in_site, sum_shards


@dataclasses.dataclass(frozen=True)
class GatheredWeights:
    """A source that gathers the weights of one layer from the shards of all of them (ZeRO 3)."""

    shards: Parameters
    """Stacked on a leading layers dim."""
    layouts: Any
    """Of one layer."""
    plan: StepPlan

    def gather(self, index: jax.Array) -> Parameters:
        """The weights of layer `index`: what is carried to its turn."""
        return gather_weights(layer_slice(self.shards, index), self.layouts, self.plan)

    def take(
        self, ahead: Parameters, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, Parameters]:
        """The weights that were gathered a turn ago, while those of the next turn come."""
        return ahead, self.gather(following)


class ScatteredSums(NamedTuple):
    """The gradients of all layers, but for one that is on its way to its shards."""

    shards: Parameters
    """Stacked, summed over the ranks of a site that share a layer's weights."""
    pending: Parameters
    """The whole gradient of one layer."""
    layer: jax.Array
    """The number of that layer."""


@dataclasses.dataclass(frozen=True)
class ScatteredGradients:
    """A sink that keeps shards of the gradients, and one layer's gradient whole (ZeRO 2)."""

    layouts: Any
    """Of one layer."""
    plan: StepPlan

    def start(self, nothing: Parameters, count: int) -> ScatteredSums:
        """Sums of nothing, for `count` layers whose gradients are like `nothing`, all zero."""
        shards = jax.eval_shape(lambda: scatter_in_site(nothing, self.layouts, self.plan))
        stacked = zeros_of(shards, count)
        return ScatteredSums(stacked, nothing, jnp.int32(0))

    def put(self, sums: ScatteredSums, index: jax.Array, gradient: Parameters) -> ScatteredSums:
        """Reduces the gradient that came before this one, and leaves this one for the next turn."""
        pending = jax.tree.map(lambda leaf, old: leaf.astype(old.dtype), gradient, sums.pending)
        return ScatteredSums(self.finish(sums), pending, index)

    def finish(self, sums: ScatteredSums) -> Parameters:
        """The shards with the pending gradient in them."""
        reduced = scatter_in_site(sums.pending, self.layouts, self.plan)
        return add_at(sums.shards, sums.layer, reduced)


@dataclasses.dataclass(frozen=True)
class ReducedGradients:
    """A sink that reduces each layer's gradient all the way, over the sites too.

    For a backward whose loop is unrolled, of the last microbatch of a step: no reduction is awaited
    before all layers are done.
    """

    layouts: Any
    """Of one layer."""
    plan: StepPlan
    before: Parameters | None
    """The gradients of the microbatches before, stacked: whole, or shards from ZeRO 2 on."""

    def put(
        self, sums: tuple[Parameters, ...], index: jax.Array, gradient: Parameters
    ) -> tuple[Parameters, ...]:
        """`sums` are the shards of the layers from the last one down to this one."""
        before = None if self.before is None else layer_slice(self.before, index)
        return (*sums, reduce_last(before, gradient, self.layouts, self.plan))

    def finish(self, sums: tuple[Parameters, ...]) -> Parameters:
        """The shards of all layers, stacked."""
        return jax.tree.map(lambda *shards: jnp.stack(shards[::-1]), *sums)


def reduce_last(before: Any, gradient: Any, layouts: Any, plan: StepPlan) -> Any:
    """Each rank's shard of the sum over microbatches and ranks, of any subtree of the parameters.

    Args:
        before: of all microbatches but the last: whole, or shards from ZeRO 2 on; None, of none.
        gradient: of the last microbatch.
        layouts: of the subtree.
        plan: how the step runs.
    """
    gradient = jax.tree.map(lambda leaf: leaf.astype(plan.policy.reduce_dtype), gradient)
    if before is None:
        return reduce_gradients(gradient, layouts, plan)
    if plan.zero_stage < 2:
        total = jax.tree.map(jnp.add, before, gradient)
        return reduce_gradients(total, layouts, plan)
    shards = scatter_in_site(gradient, layouts, plan)
    return sum_shards(jax.tree.map(jnp.add, before, shards), layouts, plan)
