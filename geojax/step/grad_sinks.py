"""Sinks for the gradients of a backward pass, which are reduced layer by layer.

The sinks of `geojax.models.chunk.layer_io` for a state in shards; the sources are in
`geojax.step.gather`. Each message is issued in the iteration of a layer whose
computation does not wait for it, and its result is used later:

    forward    iteration l    compute layer l    gather the weights of layer l+1
    backward   iteration l    compute layer l    gather the weights of layer l-1
                                                 reduce-scatter the gradient of layer l+1
                                                 all-reduce the shards of layer l+2 over the sites

(Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".)
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from geojax.collectives import after, token_of
from geojax.collectives.axes import zeros_of
from geojax.models.chunk.layer_io import GradientSink, add_at, layer_slice, layers_slice
from geojax.models.declaration import Parameters
from geojax.precision import detach_amax
from geojax.step.grad_reduce import (
    GradReduce,
    ReducedGradients,
    accumulate_in_site,
    start_grad_reduce,
)
from geojax.step.plan import StepPlan


class AmaxSums(NamedTuple):
    """The sums of another sink, and the amax of all layers."""

    weights: Any
    amax: Any
    """Stacked; the largest over the microbatches so far."""


@dataclasses.dataclass(frozen=True)
class AmaxSink:
    """A sink that keeps the amax of layers apart from the gradients of weights, which it passes on.

    In the gradient tree such a leaf holds the amax observed in this step: it is never summed.
    """

    sink: GradientSink

    @property
    def warmup_iterations(self) -> int:
        """Iterations before the wrapped sink produces its first result."""
        return self.sink.warmup_iterations

    def put(self, sums: AmaxSums, first: jax.Array, gradients: Parameters) -> AmaxSums:
        """Keep the amax, and put the gradients of weights into the wrapped sink."""
        weights, amax = detach_amax(gradients)
        return AmaxSums(self.sink.put(sums.weights, first, weights), add_at(sums.amax, first, amax))


class Zero2Sums(NamedTuple):
    """The gradients of all layers, but for one that waits for its reduce-scatter."""

    shards: Parameters
    """Stacked, each summed over the ranks of a site that share its layer's weights."""
    pending: Parameters
    """The whole gradient of one layer, stacked alone."""
    layer: jax.Array
    """The number of that layer."""


@dataclasses.dataclass(frozen=True)
class Zero2Sink:
    """A sink that keeps shards of the gradients, and one layer's gradient whole (ZeRO 2)."""

    layouts: Any
    """The `LeafLayout`s of one layer, stacked alone."""
    plan: StepPlan

    warmup_iterations = 0

    def start(self, layer: Parameters, count: int, zero: jax.Array) -> Zero2Sums:
        """Make sums of `zero` for `count` layers whose weights have the types of `layer`."""
        pending = zeros_of(layer, 1, zero=zero)
        shard = jax.eval_shape(lambda: layer_slice(self._scatter(pending), 0))
        return Zero2Sums(zeros_of(shard, count, zero=zero), pending, jnp.int32(0))

    def put(self, sums: Zero2Sums, first: jax.Array, gradients: Parameters) -> Zero2Sums:
        """Scatter the gradient that came before, and keep this one for the next iteration."""
        return Zero2Sums(self.finish(sums), gradients, first)

    def finish(self, sums: Zero2Sums) -> Parameters:
        """Return the shards of all layers, the pending one scattered too."""
        return add_at(sums.shards, sums.layer, self._scatter(sums.pending))

    def _scatter(self, unreduced: Parameters) -> Parameters:
        return accumulate_in_site(None, unreduced, self.layouts, self.plan)


class OverlappedSums(NamedTuple):
    """The gradients of all layers, but for those in flight."""

    reduced: ReducedGradients
    """Shards that are summed over all ranks, stacked."""
    unreduced: Parameters | None = None
    """Gradients of the last iteration, where they have to be summed in the site first."""
    started: GradReduce | None = None
    """Gradients ready to be exchanged between sites."""
    exchanged: GradReduce | None = None
    """Gradient buckets that have left but not arrived."""


def warmup_iterations(plan: StepPlan) -> int:
    """Count the iterations of `OverlappedReduceSink` before there is something to send."""
    return 2 if _scatters(plan) else 1


def _scatters(plan: StepPlan) -> bool:
    return any(size > 1 for axis, size in plan.mesh.shape.items() if axis != "dc")


@dataclasses.dataclass(frozen=True)
class OverlappedReduceSink:
    """A sink that reduces the gradients of a step's last microbatch, over the sites too.

    A software pipeline over iterations. All messages of an iteration are made of its inputs, and
    nothing in it waits for their results: they may travel as long as it lasts. Each is one bucket:
    a compiler would start some of several only when others are done.

        iteration t      backward of layers t      scatter gradients t+1    all-reduce shards t+2
        iteration t-1    backward of layers t-1    scatter gradients t      all-reduce shards t+1

    A site of one rank has nothing to scatter, and sends what the iteration before has computed.
    """

    layouts: Any
    """The `LeafLayout`s of the layers of one iteration, stacked."""
    plan: StepPlan
    accumulated: Parameters | None
    """Gradients of the microbatches before, stacked: whole, or shards from ZeRO 2 on."""
    error_feedback: Any
    """The errors of all layers, from the step before (see `geojax.step.error_feedback`); None: none
    are kept."""

    @property
    def warmup_iterations(self) -> int:
        """Iterations before there is something to send over the link."""
        return warmup_iterations(self.plan)

    def start(self, layer: Parameters, count: int, zero: jax.Array) -> OverlappedSums:
        """Make sums of `zero` for `count` layers whose weights have the types of `layer`."""
        unreduced = zeros_of(layer, self.plan.bucket_layers)

        def one_layer() -> ReducedGradients:
            started = self._start(unreduced, jnp.int32(0))
            return layer_slice(started.exchange().done(), 0)

        return OverlappedSums(zeros_of(jax.eval_shape(one_layer), count, zero=zero))

    def put(self, sums: OverlappedSums, first: jax.Array, gradients: Parameters) -> OverlappedSums:
        """Send on the results of the last iterations, and keep these gradients for the next one."""
        return self._put(sums, first, gradients)

    def finish(self, sums: OverlappedSums) -> ReducedGradients:
        """Send on the results of the last iterations, and return the shards of all layers."""
        iteration = 0
        while sums.unreduced is not None or sums.started is not None or sums.exchanged is not None:
            iteration -= 1
            sums = self._put(sums, jnp.int32(iteration * self.plan.bucket_layers), None)
        return sums.reduced

    def _put(
        self, sums: OverlappedSums, first: jax.Array, gradients: Parameters | None
    ) -> OverlappedSums:
        bucket_layers = self.plan.bucket_layers
        reduced = sums.reduced
        if sums.exchanged is not None:
            arrived = first + (self.warmup_iterations + 1) * bucket_layers
            reduced = add_at(reduced, arrived, sums.exchanged.done(), empty=True)
        exchanged = None
        if sums.started is not None:
            exchanged = sums.started.exchange()
            if gradients is not None:
                # Messages keep their memory until the iteration is over: XLA for CPUs else gives it
                # to what the iteration computes, which then waits for them.
                exchanged = after(exchanged, token_of((gradients, sums.started)))
        ready, unreduced, layers = gradients, None, first
        if _scatters(self.plan):
            ready, unreduced, layers = sums.unreduced, gradients, first + bucket_layers
        started = None if ready is None else self._start(ready, layers)
        if started is not None and exchanged is None:
            # Zeros in the first iteration, so that all have the same types. They are written at the
            # end of the stack, where the first gradients that arrive overwrite them.
            exchanged = zeros_of(jax.eval_shape(started.exchange))
        return OverlappedSums(reduced, unreduced, started, exchanged)

    def _start(self, unreduced: Parameters, first: jax.Array) -> GradReduce:
        """Sum the gradients of layers from `first` on in the site, ready to be exchanged."""
        accumulated = self.accumulated
        if accumulated is not None:
            accumulated = layers_slice(accumulated, first, self.plan.bucket_layers)
        plan = self.plan.one_message
        shards = accumulate_in_site(accumulated, unreduced, self.layouts, plan)
        errors = layers_slice(self.error_feedback, first, self.plan.bucket_layers)
        return start_grad_reduce(shards, errors, self.layouts, plan, scattered=True)
