"""Gradients that are reduced, and weights that are gathered, layer by layer.

The sources and sinks of `geojax.models.layer_scan` for a state in shards. Each message is issued in
the turn of a layer whose computation does not wait for it, and what it brings is used later:

    forward    turn l     compute layer l          gather the weights of layer l+1
    backward   turn l     compute layer l          gather the weights of layer l-1
                                                   scatter the gradient of layer l+1
                                                   sum the shards of layer l+2 over the sites

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".)
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.models.layer_scan import (
    GradientSink,
    WeightSource,
    add_at,
    layer_slice,
    layers_slice,
)
from geojax.models.parameters import Parameters
from geojax.models.varying import zeros_of
from geojax.train.amax_history import attach, detach
from geojax.train.plan import StepPlan
from geojax.train.weights import Summed, gather_in_site, scatter_in_site, sum_shards


@dataclasses.dataclass(frozen=True)
class GatheredWeights:
    """A source that gathers the weights of one layer from the shards of all of them (ZeRO 3)."""

    shards: Parameters
    """Stacked on a leading layers dim; nothing of them is at another site alone."""
    layouts: Any
    """Of one layer."""
    plan: StepPlan

    def gather(self, index: jax.Array) -> Parameters:
        """The weights of layer `index`: what is carried to its turn."""
        return gather_in_site(layer_slice(self.shards, index), self.layouts, self.plan)

    def take(
        self, ahead: Parameters, index: jax.Array, following: jax.Array
    ) -> tuple[Parameters, Parameters]:
        """The weights that were gathered a turn ago, while those of the next turn come."""
        return ahead, self.gather(following)


@dataclasses.dataclass(frozen=True)
class ExpectantWeights:
    """A source that tells each linear layer which magnitudes to expect (see `amax_history`)."""

    source: WeightSource
    expected: Any
    """Of all layers, stacked; None: nothing."""

    def take(self, ahead: Any, index: jax.Array, following: jax.Array) -> tuple[Parameters, Any]:
        """The weights of layer `index`, with what is expected beside them."""
        weights, ahead = self.source.take(ahead, index, following)
        return attach(weights, layer_slice(self.expected, index)), ahead


class WatchedSums(NamedTuple):
    """The sums of a sink, and what was seen in the layers."""

    weights: Any
    seen: Any
    """Stacked; the largest so far."""


@dataclasses.dataclass(frozen=True)
class WatchedGradients:
    """A sink that keeps what was seen apart from the gradients of weights, which it passes on."""

    sink: GradientSink

    @property
    def turns_to_fill(self) -> int:
        """That of the sink within."""
        return self.sink.turns_to_fill

    def put(self, sums: WatchedSums, first: jax.Array, gradients: Parameters) -> WatchedSums:
        """Gradients go to the sink within."""
        weights, seen = detach(gradients)
        return WatchedSums(
            self.sink.put(sums.weights, first, weights), add_at(sums.seen, first, seen)
        )


class ScatteredSums(NamedTuple):
    """The gradients of all layers, but for one that is on its way to its shards."""

    shards: Parameters
    """Stacked, summed over the ranks of a site that share a layer's weights."""
    pending: Parameters
    """The whole gradient of one layer, stacked alone."""
    layer: jax.Array
    """The number of that layer."""


@dataclasses.dataclass(frozen=True)
class ScatteredGradients:
    """A sink that keeps shards of the gradients, and one layer's gradient whole (ZeRO 2)."""

    layouts: Any
    """Of one layer, stacked alone."""
    plan: StepPlan

    turns_to_fill = 0

    def start(self, layer: Parameters, count: int) -> ScatteredSums:
        """Sums of nothing, for `count` layers whose weights have the types of `layer`."""
        pending = zeros_of(layer, 1)
        shard = jax.eval_shape(lambda: layer_slice(self._scatter(pending), 0))
        return ScatteredSums(zeros_of(shard, count), pending, jnp.int32(0))

    def put(self, sums: ScatteredSums, first: jax.Array, gradients: Parameters) -> ScatteredSums:
        """Reduces the gradient that came before this one, and leaves this one for the next turn."""
        return ScatteredSums(self.finish(sums), gradients, first)

    def finish(self, sums: ScatteredSums) -> Parameters:
        """The shards with the pending gradient in them."""
        return add_at(sums.shards, sums.layer, self._scatter(sums.pending))

    def _scatter(self, whole: Parameters) -> Parameters:
        return site_shards(None, whole, self.layouts, self.plan)


class ReducedSums(NamedTuple):
    """The gradients of all layers, but for those that are on their way."""

    reduced: Summed
    """The shards of what is summed over everybody, stacked."""
    whole: Parameters | None
    """The gradients of the last turn."""
    shards: Parameters | None
    """Those of the turn before it, summed over the site."""


@dataclasses.dataclass(frozen=True)
class ReducedGradients:
    """A sink that reduces gradients all the way, over the sites too: of a step's last microbatch.

    A pipeline over three turns. Both messages of a turn are made of what it begins with, and
    nothing in it waits for what they bring: they may travel as long as it lasts. Each is one chunk:
    of several, a compiler would start some only when others are done.

        turn t      backward of layers t      scatter gradients t+1    sum shards t+2 over sites
        turn t-1    backward of layers t-1    scatter gradients t      sum shards t+1 over sites
    """

    layouts: Any
    """Of a turn's layers, stacked."""
    plan: StepPlan
    before: Parameters | None
    """The gradients of the microbatches before, stacked: whole, or shards from ZeRO 2 on."""
    errors: Any
    """Of all layers, from the step before (see `geojax.train.wire_errors`); None: none are kept."""

    turns_to_fill = 2

    def start(self, layer: Parameters, count: int) -> ReducedSums:
        """Sums of nothing, for `count` layers whose weights have the types of `layer`."""
        whole = zeros_of(layer, self.plan.overlap_layers)
        shard = jax.eval_shape(
            lambda: layer_slice(self._sum(self._scatter(whole, jnp.int32(0)), jnp.int32(0)), 0)
        )
        return ReducedSums(zeros_of(shard, count), None, None)

    def put(self, sums: ReducedSums, first: jax.Array, gradients: Parameters) -> ReducedSums:
        """Sends on what the last two turns left, and leaves these gradients for the next one."""
        together = self.plan.overlap_layers
        reduced = sums.reduced
        if sums.shards is not None:
            third = first + 2 * together
            reduced = add_at(reduced, third, self._sum(sums.shards, third), empty=True)
        shards = None if sums.whole is None else self._scatter(sums.whole, first + together)
        return ReducedSums(reduced, gradients, shards)

    def finish(self, sums: ReducedSums) -> Summed:
        """The shards of all layers: what the last two turns left is sent on."""
        assert sums.whole is not None, "there is at least one turn"
        first = jnp.int32(0)
        shards = self._scatter(sums.whole, first)
        reduced = sums.reduced
        if sums.shards is not None:
            second = first + self.plan.overlap_layers
            reduced = add_at(reduced, second, self._sum(sums.shards, second), empty=True)
        summed: Summed = add_at(reduced, first, self._sum(shards, first), empty=True)
        return summed

    def _scatter(self, whole: Parameters, first: jax.Array) -> Parameters:
        before = self.before
        if before is not None:
            before = layers_slice(before, first, self.plan.overlap_layers)
        return site_shards(before, whole, self.layouts, self.plan.one_message)

    def _sum(self, shards: Parameters, first: jax.Array) -> Summed:
        errors = layers_slice(self.errors, first, self.plan.overlap_layers)
        return sum_shards(shards, errors, self.layouts, self.plan.one_message)


def site_shards(before: Any, gradient: Any, layouts: Any, plan: StepPlan) -> Any:
    """Each rank's shard of the sum over microbatches and the site, of a subtree of the parameters.

    Args:
        before: of all microbatches but the last: whole, or shards from ZeRO 2 on; None, of none.
        gradient: of the last microbatch.
        layouts: of the subtree.
        plan: how the step runs.
    """
    whole = jax.tree.map(lambda leaf: leaf.astype(plan.policy.reduce_dtype), gradient)
    if before is None:
        return scatter_in_site(whole, layouts, plan)
    if plan.zero_stage < 2:
        return scatter_in_site(jax.tree.map(jnp.add, before, whole), layouts, plan)
    return jax.tree.map(jnp.add, before, scatter_in_site(whole, layouts, plan))
