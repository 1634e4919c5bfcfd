"""Gradients that are reduced layer by layer, while weights are gathered layer by layer.

The sinks of `geojax.models.chunk.layer_io` for a state in shards; the sources are in
`geojax.step.weight_sources`. Each message is issued in the turn of a layer whose computation does
not wait for it, and what it brings is used later:

    forward    turn l     compute layer l          gather the weights of layer l+1
    backward   turn l     compute layer l          gather the weights of layer l-1
                                                   scatter the gradient of layer l+1
                                                   sum the shards of layer l+2 over the sites

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".)
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives import after
from geojax.models.chunk.layer_io import (
    GradientSink,
    add_at,
    layer_slice,
    layers_slice,
)
from geojax.models.parallel.varying import zeros_of
from geojax.models.parameters import Parameters
from geojax.step.amax_history import detach
from geojax.step.grad_reduce import (
    GradReduce,
    ReducedGradients,
    intra_site_reduce_scatter,
    start_grad_reduce,
)
from geojax.step.plan import StepPlan


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
    def warmup_iterations(self) -> int:
        """That of the sink within."""
        return self.sink.warmup_iterations

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

    warmup_iterations = 0

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

    reduced: ReducedGradients
    """The shards of what is summed over everybody, stacked."""
    whole: Parameters | None = None
    """The gradients of the last turn, where they are to be summed in the site first."""
    started: GradReduce | None = None
    """Gradients ready to cross."""
    crossed: GradReduce | None = None
    """Those of the turn before, which did."""


@dataclasses.dataclass(frozen=True)
class OverlappedReduceSink:
    """A sink that reduces gradients all the way, over the sites too: of a step's last microbatch.

    A pipeline over turns. All messages of a turn are made of what it begins with, and nothing in it
    waits for what they bring: they may travel as long as it lasts. Each is one chunk: of several, a
    compiler would start some only when others are done.

        turn t      backward of layers t      scatter gradients t+1    sum shards t+2 over sites
        turn t-1    backward of layers t-1    scatter gradients t      sum shards t+1 over sites

    A site of one rank has nothing to scatter, and sends what the turn before has computed.
    """

    layouts: Any
    """Of a turn's layers, stacked."""
    plan: StepPlan
    before: Parameters | None
    """The gradients of the microbatches before, stacked: whole, or shards from ZeRO 2 on."""
    errors: Any
    """Of all layers, from the step before (see `geojax.step.error_feedback`); None: none."""

    @property
    def warmup_iterations(self) -> int:
        """Until there is something to send over the link."""
        return 2 if self._scatters else 1

    @property
    def _scatters(self) -> bool:
        sizes = self.plan.mesh.shape
        return any(size > 1 for axis, size in sizes.items() if axis != "dc")

    def start(self, layer: Parameters, count: int) -> ReducedSums:
        """Sums of nothing, for `count` layers whose weights have the types of `layer`."""
        whole = zeros_of(layer, self.plan.bucket_layers)

        def one_layer() -> ReducedGradients:
            begun = self._start(whole, jnp.int32(0))
            return layer_slice(begun.exchange().done(), 0)

        return ReducedSums(zeros_of(jax.eval_shape(one_layer), count))

    def put(self, sums: ReducedSums, first: jax.Array, gradients: Parameters) -> ReducedSums:
        """Sends on what the last turns left, and leaves these gradients for the next one."""
        return self._put(sums, first, gradients)

    def finish(self, sums: ReducedSums) -> ReducedGradients:
        """The shards of all layers: what the last turns left is sent on."""
        turn = 0
        while sums.whole is not None or sums.started is not None or sums.crossed is not None:
            turn -= 1
            sums = self._put(sums, jnp.int32(turn * self.plan.bucket_layers), None)
        return sums.reduced

    def _put(
        self, sums: ReducedSums, first: jax.Array, gradients: Parameters | None
    ) -> ReducedSums:
        together = self.plan.bucket_layers
        reduced = sums.reduced
        if sums.crossed is not None:
            arrived = first + (self.warmup_iterations + 1) * together
            reduced = add_at(reduced, arrived, sums.crossed.done(), empty=True)
        crossed = None
        if sums.started is not None:
            crossed = sums.started.exchange()
            if gradients is not None:
                # What is sent and what comes stay where they are until the turn is over: XLA for
                # CPUs else gives their memory to what the turn computes, which waits for them then.
                crossed = after(crossed, _token((gradients, sums.started)))
        ready, whole, layers = gradients, None, first
        if self._scatters:
            ready, whole, layers = sums.whole, gradients, first + together
        started = None if ready is None else self._start(ready, layers)
        if started is not None and crossed is None:
            # Nothing comes in the first turn, as in all others. It is written over the end of the
            # stack, where the first gradients that come will be written over it.
            crossed = zeros_of(jax.eval_shape(started.exchange))
        return ReducedSums(reduced, whole, started, crossed)

    def _start(self, whole: Parameters, first: jax.Array) -> GradReduce:
        """The gradients of layers from `first` on, summed in the site and ready to cross."""
        before = self.before
        if before is not None:
            before = layers_slice(before, first, self.plan.bucket_layers)
        plan = self.plan.one_message
        shards = site_shards(before, whole, self.layouts, plan)
        errors = layers_slice(self.errors, first, self.plan.bucket_layers)
        return start_grad_reduce(shards, errors, self.layouts, plan, scattered=True)


def _token(tree: Any) -> jax.Array:
    """A number that is known when all of `tree` is."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    numbers = [leaf.ravel()[0].astype(jnp.float32) for leaf in leaves]
    return functools.reduce(jnp.add, numbers)


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
        return intra_site_reduce_scatter(whole, layouts, plan)
    if plan.zero_stage < 2:
        return intra_site_reduce_scatter(jax.tree.map(jnp.add, before, whole), layouts, plan)
    return jax.tree.map(jnp.add, before, intra_site_reduce_scatter(whole, layouts, plan))
