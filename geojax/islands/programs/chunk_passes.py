"""The work of a site on its chunks: gather their weights, run them forwards and backwards.

Weights are gathered once a step or, under ZeRO 3, layer by layer in every pass.

Everything here runs inside the site's `shard_map`, takes and gives `PerRank`s, and is dispatched by
the walk, microbatch by microbatch.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from geojax.collectives.axes import vary_over, varying_axes, zeros_of
from geojax.islands.programs.per_rank import pack, unpack
from geojax.islands.programs.site_part import SitePart
from geojax.islands.programs.values import (
    ChunkParameters,
    ChunkSums,
    Kept,
    LayerShards,
    PassInputs,
    SiteWeights,
    StepInputs,
)
from geojax.models import Parameters
from geojax.models.chunk.chunk import Chunk, ChunkBackward, ChunkWeights
from geojax.models.chunk.layer_io import LayerWeights, StackedGradients, StackedWeights, layer_slice
from geojax.models.transformer import read_by_head
from geojax.precision import attach_amax, detach_amax
from geojax.sharding import LeafLayout
from geojax.step.amax_history import prev_amax
from geojax.step.forward_backward import ForwardBackward
from geojax.step.gather import (
    GatheredWeights,
    WeightsWithAmax,
    gather_layers,
    gather_weights,
    shards_to_gather,
    without_layers,
)
from geojax.step.grad_reduce import intra_site_reduce_scatter
from geojax.step.grad_sinks import AmaxSink, AmaxSums, Zero2Sink
from geojax.step.gradients import split_microbatches, trained_layer
from geojax.step.plan import StepPlan
from geojax.step.update import gradient_factor, sum_in_site, sum_scalars_over_sites


@dataclasses.dataclass(frozen=True)
class ChunkPasses:
    """The passes of a site's chunks."""

    part: SitePart
    plan: StepPlan
    layouts: Parameters
    """The `LeafLayout` of each parameter that the site holds."""

    @property
    def sink(self) -> Zero2Sink | StackedGradients:
        """The sink of the gradients of a chunk's layers."""
        if self.plan.layout.zero.stage < 2:
            return StackedGradients(
                self.plan.policy.reduce_dtype, once=self.plan.layout.batch.microbatches == 1
            )
        layouts = jax.tree.map(lambda layout: layout.of_layers(1), self.layouts["layers"])
        return Zero2Sink(layouts, self.plan)

    def gather(self, parameters: Parameters, history: Any) -> Any:
        """Gather the weights of all chunks, in the compute dtype: `SiteWeights`.

        Layers that every pass gathers for itself stay in shards.
        """
        plan, part = self.plan, self.part
        amax = prev_amax(history, plan)

        def span_weights(chunk: int, span: range, quantized: bool) -> Parameters | LayerShards:
            own = part.layers_of(parameters["layers"], span, chunk)
            own_amax = part.layers_of(amax, span, chunk)
            layouts = jax.tree.map(
                lambda layout: layout.of_layers(len(span)), self.layouts["layers"]
            )
            if plan.gathers_layer_by_layer and quantized:
                sent = shards_to_gather(own, layouts, plan, own_amax, quantized=True)
                return LayerShards(sent, own_amax)
            gathered = gather_layers(own, layouts, plan, own_amax, quantized=quantized)
            return attach_amax(gathered, own_amax)

        def spans(layers: range) -> Iterator[tuple[range, bool]]:
            """Yield the spans of a chunk, each with True where it is quantized."""
            for span, matmul in plan.matmul.spans_within(layers, part.model.num_stacked_layers):
                length = len(span) if plan.scans_layers else 1
                for first in span[::length]:
                    yield range(first, first + length), matmul.recipe == plan.policy.recipe

        chunks = {
            chunk: [span_weights(chunk, *span) for span in spans(layers)]
            for chunk, layers in part.chunks.items()
        }
        non_layer = gather_weights(without_layers(parameters), without_layers(self.layouts), plan)
        return pack(SiteWeights(non_layer, chunks))

    def embed(self, layouts: Parameters, shards: Parameters, inputs: StepInputs) -> Any:
        """Embed a microbatch, with shards of the tables: a stream as it is between chunks."""
        gathered = gather_weights(shards, layouts, self.plan)
        functions = self._run(inputs).whole_model.functions
        return pack(functions.embed(gathered, self._microbatch(inputs, 0)))

    def start(self, chunk: int, weights: Any, inputs: StepInputs) -> Any:
        """Make the `ChunkSums` before the first microbatch: zeros."""
        return pack(self._so_far(chunk, weights, inputs, None))

    def _so_far(self, chunk: int, weights: Any, inputs: StepInputs, sums: Any) -> ChunkSums:
        """Return the sums of the backwards so far; zeros if there are None."""
        if sums is not None:
            made: ChunkSums = unpack(sums)
            return made
        own: ChunkParameters = unpack(weights)
        layer = jax.eval_shape(lambda: trained_layer(self._weights(own).layers[0]))
        amax = [_prev_amax(span) for span in own.spans]
        layers = AmaxSums(
            self.sink.start(layer, len(self.part.chunks[chunk]), jnp.zeros(())),
            None if amax[0] is None else zeros_of(self.part.join_layers(amax)),
        )
        zero = jnp.zeros((), self._run(inputs).loss_dtype)
        zero = vary_over(zero, varying_axes(inputs.batch["loss_mask"]))
        first = {"embedding": own.first} if own.first else {}
        of_non_layers = jax.eval_shape(
            lambda: (self._as_summed(first), self._as_summed(own.last, of_head=True))
        )
        first, last = zeros_of(of_non_layers)
        aux_loss = zero if self.part.model.is_moe else None
        return ChunkSums(layers, first, last, zero, aux_loss)

    def forward(self, chunk: int, given: PassInputs) -> Any:
        """Run a chunk forwards: the stream after it, and `Kept`."""
        own, batch = self._chunk(chunk, given.step), self._microbatch(given.step, given.microbatch)
        weights, x = self._weights(unpack(given.weights)), unpack(given.taken)
        made = own.forward(weights, x, batch, own.functions.context(batch))
        return pack((made.x, Kept(made.residuals, made.balance_loss)))

    def backward(self, chunk: int, given: PassInputs, sums: Any, *, is_split: bool = False) -> Any:
        """Run a chunk backwards: the cotangent before it, None of the first one, and the sums.

        Args:
            chunk: the chunk.
            given: its arguments.
            sums: of the backwards before; None: there are none.
            is_split: run the first half of a split backward: the gradients of the layers' weights
                are not in the sums, and what they are made of, the stash, is returned too.
        """
        own, batch = self._chunk(chunk, given.step), self._microbatch(given.step, given.microbatch)
        kept: Kept = unpack(given.kept)
        so_far = self._so_far(chunk, given.weights, given.step, sums)
        weights, cotangent = self._weights(unpack(given.weights), backwards=True), given.taken
        context = own.functions.context(batch)
        taken = (weights, kept.residuals, unpack(cotangent), batch, context)
        if is_split:
            made = own.input_gradient(*taken)
            layers, stash = so_far.layers, made.layers
        else:
            made = own.backward(*taken, AmaxSink(self.sink), so_far.layers)
            layers, stash = made.layers, None
        following = self._plus(so_far, made, layers, kept.aux_loss, own.is_first)
        return pack((None if own.is_first else made.x, following, stash))

    def weight_gradients(self, chunk: int, given: PassInputs, sums: Any) -> Any:
        """Run the second half of a split backward: the sums."""
        own, batch = self._chunk(chunk, given.step), self._microbatch(given.step, given.microbatch)
        kept: Kept = unpack(given.kept)
        so_far: ChunkSums = unpack(sums)
        assert kept.stash is not None, "the first half of the backward must come before"
        weights, context = self._weights(unpack(given.weights)), own.functions.context(batch)
        layers = own.weight_gradients(
            weights, kept.residuals, kept.stash, context, AmaxSink(self.sink), so_far.layers
        )
        return pack(so_far._replace(layers=layers))

    def forward_only(self, chunk: int, given: PassInputs) -> Any:
        """Run a chunk forwards, without dropout: the stream, or of the last one the loss."""
        run = ForwardBackward(self.part.model, self.plan, None).for_evaluation
        own = run.chunk(self.part.chunks[chunk])
        batch = self._microbatch(given.step, given.microbatch)
        weights, x = self._weights(unpack(given.weights)), unpack(given.taken)
        made, _ = own.forward_only(weights, x, batch, own.functions.context(batch))
        return pack(made)

    def validation_sums(self, losses: Any, inputs: StepInputs) -> jax.Array:
        """Return [sum of losses, number of targets] of the site; 0 where it has no head."""
        dtype = self._run(inputs).loss_dtype
        targets = inputs.batch["loss_mask"].astype(dtype).sum()
        if not self.part.has_head:
            targets = jnp.zeros_like(targets)
        own: list[jax.Array] = unpack(losses)
        loss = functools.reduce(jnp.add, own, jnp.zeros_like(targets))
        return sum_scalars_over_sites(sum_in_site(jnp.stack([loss, targets])), self.plan)

    def _weights(self, own: ChunkParameters, *, backwards: bool = False) -> ChunkWeights:
        """Return a chunk's weights as a pass takes them, which begins with the first layer.

        Args:
            own: the chunk's, unpacked.
            backwards: the pass begins with the last layer.
        """

        def of_span(span: Parameters | LayerShards) -> LayerWeights:
            if not isinstance(span, LayerShards):
                return LayerWeights(StackedWeights(span))
            layouts = jax.tree.map(LeafLayout.of_layer, self.layouts["layers"])
            source = GatheredWeights(span.shards, 0, None, layouts, self.plan)
            last = len(jax.tree.leaves(span.shards)[0]) - 1
            prefetched = source.gather(jnp.int32(last if backwards else 0))
            return LayerWeights(WeightsWithAmax(source, span.prev_amax), prefetched)

        return ChunkWeights(own.first, [of_span(span) for span in own.spans], own.last)

    def _run(self, inputs: StepInputs) -> ForwardBackward:
        model, plan, key = self.part.model, self.plan, None
        if model.is_random:
            key = jax.random.fold_in(jax.random.key(inputs.seed), inputs.step)
        factor = gradient_factor(inputs.loss_scale, inputs.batch, plan)
        return ForwardBackward(model, plan, key, factor)

    def _chunk(self, chunk: int, inputs: StepInputs) -> Chunk:
        return self._run(inputs).chunk(self.part.chunks[chunk])

    def _microbatch(self, inputs: StepInputs, number: jax.Array | int) -> Any:
        return layer_slice(split_microbatches(inputs.batch, self.plan), number)

    def _as_summed(self, gradients: Parameters, *, of_head: bool = False) -> Parameters:
        """Return gradients of weights in no layer as they are summed over microbatches.

        Those `of_head` are of what the head reads.
        """
        dtype = self.plan.policy.reduce_dtype
        gradients = jax.tree.map(lambda leaf: leaf.astype(dtype), gradients)
        if self.plan.layout.zero.stage < 2:
            return gradients
        layouts = self.layouts
        if of_head and gradients:
            layouts = read_by_head(layouts, self.part.model)
        layouts = {name: layouts[name] for name in gradients}
        shards: Parameters = intra_site_reduce_scatter(gradients, layouts, self.plan)
        return shards

    def _plus(
        self,
        sums: ChunkSums,
        made: ChunkBackward,
        layers: AmaxSums,
        aux_loss: jax.Array | None,
        is_first: bool,
    ) -> ChunkSums:
        """Add what a microbatch made in a chunk; the sink has made the sums of its `layers`."""
        first = {"embedding": made.first} if is_first else {}
        if aux_loss is not None:
            assert sums.aux_loss is not None, "every chunk of experts has an aux loss"
            aux_loss = sums.aux_loss + aux_loss
        return ChunkSums(
            layers,
            jax.tree.map(jnp.add, sums.first, self._as_summed(first)),
            jax.tree.map(jnp.add, sums.last, self._as_summed(made.last, of_head=True)),
            sums.loss if made.loss is None else sums.loss + made.loss,
            aux_loss,
        )


def _prev_amax(span: Parameters | LayerShards) -> Any:
    """Return the amax of the steps before of a span's layers; None: there is no history."""
    return span.prev_amax if isinstance(span, LayerShards) else detach_amax(span)[1]
