"""The compiled programs of a site: gather, forward and backward of each chunk, reduce, add, apply.

Each is one `jax.jit` of a `shard_map` over the site's mesh, and dispatched by the walk. Values
between them are `PerRank`; the state is sharded as everywhere.

    gather      state ─► weights of all chunks, in the compute dtype
    forward     weights, stream, batch ─► stream, residuals
    backward    weights, residuals, cotangent, batch, sums ─► cotangent, sums
    reduce      sums ─► the site's shards of a bucket, encoded
    add         buckets of all sites ─► total
    apply       state, totals ─► state, metrics
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from geojax.islands import buckets
from geojax.islands.actions import Message
from geojax.islands.per_rank import RANKS, pack, unpack
from geojax.islands.site_part import SitePart
from geojax.models import Parameters
from geojax.models.chunk.chunk import ChunkResiduals, ChunkWeights
from geojax.models.chunk.layer_io import LayerWeights, StackedGradients, StackedWeights, layer_slice
from geojax.models.parallel.varying import vary_over, varying_axes, zeros_of
from geojax.optim import layout
from geojax.precision import attach_amax, detach_amax
from geojax.step.amax_history import max_in_site, prev_amax
from geojax.step.forward_backward import ForwardBackward
from geojax.step.gather import gather_weights
from geojax.step.grad_reduce import (
    inter_site_all_reduce,
    intra_site_reduce_scatter,
    reduce_gradients,
)
from geojax.step.grad_sinks import AmaxSink, AmaxSums, Zero2Sink
from geojax.step.gradients import split_microbatches, trained_layer
from geojax.step.plan import StepPlan
from geojax.step.program import batch_on_mesh, batch_specs, signals_on_mesh
from geojax.step.state import TrainState
from geojax.step.update import (
    SiteSums,
    apply_sums,
    gradient_factor,
    scaled,
    sum_in_site,
    sum_scalars_over_sites,
    sum_signals,
)
from geojax.step.weight_sources import gather_layers, without_layers


class SiteWeights(NamedTuple):
    """The weights that a site computes with."""

    non_layer_params: Parameters
    chunks: Mapping[int, list[Parameters]]
    """The layers of each chunk, stacked, for each span of layers that multiply alike."""


class ChunkParameters(NamedTuple):
    """The weights that a chunk computes with."""

    first: Parameters
    """Read by the embedding; {} where the chunk is not the first."""
    spans: list[Parameters]
    """Layers, stacked, for each span of layers that multiply alike."""
    last: Parameters
    """Read by the head; {} where the chunk is not the last."""

    @property
    def weights(self) -> ChunkWeights:
        """The weights as the passes of a `Chunk` take them."""
        spans = [LayerWeights(StackedWeights(span)) for span in self.spans]
        return ChunkWeights(self.first, spans, self.last)


class Kept(NamedTuple):
    """The results of the forward of a chunk that its backward reads."""

    residuals: ChunkResiduals
    aux_loss: jax.Array | None
    """The share of the chunk's balance losses in the loss; None without experts."""


class ChunkSums(NamedTuple):
    """Sums over the microbatches of a step in one chunk, on this rank."""

    layers: Any
    """The sink's."""
    first: Parameters
    """The gradient of the embedding; {} where the chunk is not the first."""
    last: Parameters
    """The gradient of what the head reads; {} where the chunk is not the last."""
    loss: jax.Array
    aux_loss: jax.Array | None


class Scalars(NamedTuple):
    """The share of a chunk in the scalars of a step, on this rank."""

    loss: jax.Array
    aux_loss: jax.Array | None
    amax: Any


class Reduced(NamedTuple):
    """The results of `SitePrograms.reduce`."""

    messages: Any
    """The bucket as it crosses (see `geojax.islands.buckets`)."""
    error_feedback: Any
    scalars: Scalars


class StepInputs(NamedTuple):
    """The arguments of a step that many programs read; they are sharded as everywhere."""

    batch: Any
    """The site's sequences."""
    loss_scale: Any
    seed: Any
    step: Any


class SitePrograms:
    """The programs of one site.

    Args:
        part: the chunks that the site holds.
        plan: how the site computes, on its own mesh.
        layouts: the `LeafLayout` of each leaf of the site's state.
        optimizer: the optax chain that runs on shards.
        schedule: learning rate by update, for the metrics.
        batch: the site's batch as `jax.ShapeDtypeStruct`s.
    """

    def __init__(
        self,
        part: SitePart,
        plan: StepPlan,
        layouts: TrainState,
        optimizer: optax.GradientTransformationExtraArgs,
        schedule: optax.Schedule,
        batch: Any,
    ):
        assert plan.mesh.shape["dc"] == plan.mesh.shape["stage"] == 1, "a mesh of one site"
        assert plan.zero_stage < 3, "a site gathers its weights once a step"
        self.part, self.plan, self.layouts = part, plan, layouts
        self._optimizer, self._schedule, self._batch = optimizer, schedule, batch
        state = jax.tree.map(lambda layout: layout.spec(), layouts)
        whole = PartitionSpec()
        inputs = StepInputs(batch_specs(batch, plan), whole, whole, whole)
        errors = state.error_feedback
        program, of_chunks = self._program, self._of_chunks
        self.gather = program(self._gather, (state.parameters, state.amax_history), RANKS)
        self.start = of_chunks(self._start, (RANKS, inputs), RANKS)
        self.forward = of_chunks(self._forward, (RANKS, RANKS, inputs, whole), RANKS)
        self.backward = of_chunks(
            self._backward, (RANKS, RANKS, RANKS, inputs, whole, RANKS), RANKS, donate=(5,)
        )
        self.reduce = of_chunks(self._reduce, (RANKS, RANKS, errors, inputs), RANKS)
        self.reduce_scalars = program(
            self._reduce_scalars, (RANKS, inputs, plan.signal_spec), RANKS
        )
        self.add = of_chunks(self._add, (RANKS,), RANKS)
        self.add_scalars = program(self._add_scalars, (RANKS,), RANKS)
        self.apply = program(self._apply, (state, RANKS, RANKS, RANKS), (state, whole), donate=(0,))

    def chunk_weights(self, weights: SiteWeights, chunk: int) -> ChunkParameters:
        """Return the weights that a chunk reads."""
        non_layer = weights.non_layer_params
        read_by_head = [name for name in non_layer if name != "embedding" or self._tied]
        return ChunkParameters(
            non_layer["embedding"] if self.part.is_first(chunk) else {},
            weights.chunks[chunk],
            {name: non_layer[name] for name in read_by_head} if self.part.is_last(chunk) else {},
        )

    @functools.cached_property
    def _payloads(self) -> dict[str | int, Any]:
        """Shapes of what crosses, traced and not computed: of each chunk's bucket, and scalars."""
        state = layout.abstract(self.layouts, self.plan.mesh)
        number = jax.ShapeDtypeStruct((), jnp.int32)
        inputs = StepInputs(batch_on_mesh(self._batch, self.plan), state.loss_scale, number, number)
        weights = self.gather.eval_shape(state.parameters, state.amax_history)
        of_chunks = {chunk: self.chunk_weights(weights, chunk) for chunk in self.part.chunks}
        sums = {c: self.start[c].eval_shape(own, inputs) for c, own in of_chunks.items()}
        reduced = {}
        for chunk, own in sums.items():
            table = sums[max(sums)].last["embedding"] if self.part.adds_table(chunk) else {}
            reduced[chunk] = self.reduce[chunk].eval_shape(own, table, state.error_feedback, inputs)
        scalars = [each.scalars for each in reduced.values()]
        payloads: dict[str | int, Any] = {c: each.messages for c, each in reduced.items()}
        payloads["scalars"] = self.reduce_scalars.eval_shape(
            scalars, inputs, signals_on_mesh(self.plan)
        )
        sharding = NamedSharding(self.plan.mesh, RANKS)
        return {
            bucket: jax.tree.map(lambda leaf: leaf.update(sharding=sharding), tree)
            for bucket, tree in payloads.items()
        }

    def payload(self, message: Message) -> Any:
        """Return the tree of `jax.ShapeDtypeStruct`s that a message from another site has."""
        return self._payloads[message.chunk if message.kind == "bucket" else message.kind]

    def _program(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any, donate: Any = ()
    ) -> Any:
        mapped = jax.shard_map(
            function, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )
        return jax.jit(mapped, donate_argnums=donate, compiler_options=self.plan.compiler_options)

    def _of_chunks(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make a program for each chunk; `function` gets the chunk's number first."""
        return {
            chunk: self._program(functools.partial(function, chunk), *arguments, **options)
            for chunk in self.part.chunks
        }

    @property
    def _tied(self) -> bool:
        return self.part.model.tie_word_embeddings

    @property
    def _scattered(self) -> bool:
        return self.plan.zero_stage >= 2

    @property
    def _sink(self) -> Zero2Sink | StackedGradients:
        if not self._scattered:
            return StackedGradients(self.plan.policy.reduce_dtype)
        layouts = jax.tree.map(
            lambda layout: layout.of_layers(1), self.layouts.parameters["layers"]
        )
        return Zero2Sink(layouts, self.plan)

    def _run(self, inputs: StepInputs) -> ForwardBackward:
        model, plan, key = self.part.model, self.plan, None
        if model.dropout:
            key = jax.random.fold_in(jax.random.key(inputs.seed), inputs.step)
        factor = gradient_factor(inputs.loss_scale, inputs.batch, plan)
        return ForwardBackward(model, plan, key, factor)

    def _microbatch(self, inputs: StepInputs, number: jax.Array) -> Any:
        return layer_slice(split_microbatches(inputs.batch, self.plan), number)

    def _in_site(self, gradients: Parameters) -> Parameters:
        """Return gradients of weights in no layer as they are summed over microbatches."""
        dtype = self.plan.policy.reduce_dtype
        gradients = jax.tree.map(lambda leaf: leaf.astype(dtype), gradients)
        if not self._scattered:
            return gradients
        layouts = {name: self.layouts.parameters[name] for name in gradients}
        shards: Parameters = intra_site_reduce_scatter(gradients, layouts, self.plan)
        return shards

    def _gather(self, parameters: Parameters, history: Any) -> Any:
        plan, part, layouts = self.plan, self.part, self.layouts.parameters
        amax = prev_amax(history, plan)
        chunks: dict[int, list[Parameters]] = {}
        for chunk, layers in part.chunks.items():
            chunks[chunk] = []
            for span, matmul in plan.matmul.spans_within(layers, part.model.num_hidden_layers):
                own = part.layers_of(parameters["layers"], span, chunk)
                own_amax = part.layers_of(amax, span, chunk)
                count = len(span)
                own_layouts = jax.tree.map(
                    lambda layout, count=count: layout.of_layers(count), layouts["layers"]
                )
                quantized = matmul.recipe == plan.policy.recipe
                gathered = gather_layers(own, own_layouts, plan, own_amax, quantized=quantized)
                chunks[chunk].append(attach_amax(gathered, own_amax))
        non_layer = gather_weights(without_layers(parameters), without_layers(layouts), plan)
        return pack(SiteWeights(non_layer, chunks))

    def _start(self, chunk: int, weights: Any, inputs: StepInputs) -> Any:
        own: ChunkParameters = unpack(weights)
        run, sink = self._run(inputs), self._sink
        layer = jax.eval_shape(lambda: trained_layer(own.weights.layers[0]))
        amax = [detach_amax(span)[1] for span in own.spans]
        layers = AmaxSums(
            sink.start(layer, len(self.part.chunks[chunk])),
            None if amax[0] is None else zeros_of(self.part.join_layers(amax)),
        )
        zero = vary_over(jnp.zeros((), run.loss_dtype), varying_axes(inputs.batch["loss_mask"]))
        first = {"embedding": own.first} if own.first else {}
        of_non_layers = jax.eval_shape(lambda: tuple(map(self._in_site, (first, own.last))))
        aux_loss = zero if self.part.model.is_moe else None
        first, last = zeros_of(of_non_layers)
        return pack(ChunkSums(layers, first, last, zero, aux_loss))

    def _forward(
        self, chunk: int, weights: Any, x: Any, inputs: StepInputs, microbatch: jax.Array
    ) -> Any:
        batch = self._microbatch(inputs, microbatch)
        own = self._run(inputs).chunk(self.part.chunks[chunk])
        made = own.forward(unpack(weights).weights, unpack(x), batch, own.functions.context(batch))
        return pack((made.x, Kept(made.residuals, made.balance)))

    def _backward(
        self,
        chunk: int,
        weights: Any,
        kept: Any,
        cotangent: Any,
        inputs: StepInputs,
        microbatch: jax.Array,
        sums: Any,
    ) -> Any:
        batch = self._microbatch(inputs, microbatch)
        own = self._run(inputs).chunk(self.part.chunks[chunk])
        so_far: ChunkSums = unpack(sums)
        residuals, aux_loss = unpack(kept)
        made = own.backward(
            unpack(weights).weights,
            residuals,
            unpack(cotangent),
            batch,
            own.functions.context(batch),
            AmaxSink(self._sink),
            so_far.layers,
        )
        first = {"embedding": made.first} if own.is_first else {}
        loss = so_far.loss if made.loss is None else so_far.loss + made.loss
        if aux_loss is not None:
            aux_loss = so_far.aux_loss + aux_loss
        following = ChunkSums(
            made.layers,
            jax.tree.map(jnp.add, so_far.first, self._in_site(first)),
            jax.tree.map(jnp.add, so_far.last, self._in_site(made.last)),
            loss,
            aux_loss,
        )
        return pack((None if own.is_first else made.x, following))

    def _reduce(self, chunk: int, sums: Any, table: Any, errors: Any, inputs: StepInputs) -> Any:
        plan, part = self.plan, self.part
        made: ChunkSums = unpack(sums)
        of_head = unpack(table)
        gradients = made.first | {"layers": self._sink.finish(made.layers.weights)}
        if of_head:
            gradients["embedding"] = jax.tree.map(jnp.add, made.first["embedding"], of_head)
        gradients |= {
            name: made.last[name] for name in part.non_layer_names(chunk) if name in made.last
        }
        layouts = part.layouts_of_bucket(self.layouts.parameters, chunk)
        reduce = inter_site_all_reduce if self._scattered else reduce_gradients
        shards = reduce(gradients, None, layouts, plan).gradients
        factor = gradient_factor(inputs.loss_scale, inputs.batch, plan)
        shards = scaled(shards, None if factor is None else 1 / factor)
        encoded = buckets.encode(shards, part.bucket(errors, chunk), plan.wire_format)
        return pack(Reduced(*encoded, Scalars(made.loss, made.aux_loss, made.layers.amax)))

    def _reduce_scalars(self, of_chunks: Any, inputs: StepInputs, signals: jax.Array) -> Any:
        """Sum losses and counts of all chunks in the site, and take the largest amax."""
        plan = self.plan
        made: list[Scalars] = unpack(of_chunks)
        loss = functools.reduce(jnp.add, (each.loss for each in made))
        targets = jnp.zeros_like(loss)
        if any(map(self.part.is_last, self.part.chunks)):
            targets += inputs.batch["loss_mask"].astype(loss.dtype).sum()
        aux_loss = [each.aux_loss for each in made if each.aux_loss is not None]
        sums = [loss, targets, *sum_signals(signals, loss)]
        if aux_loss:
            sums.append(functools.reduce(jnp.add, aux_loss))
        amax = None
        if made[0].amax is not None:
            amax = max_in_site(self.part.join_layers([each.amax for each in made]), plan)
        return pack((sum_scalars_over_sites(sum_in_site(jnp.stack(sums)), plan), amax))

    def _add(self, chunk: int, parts: Any) -> Any:
        layouts = self.part.layouts_of_bucket(self.layouts.parameters, chunk)
        plan = self.plan
        return pack(buckets.add(unpack(parts), layouts, plan.wire_format, plan.policy.reduce_dtype))

    def _add_scalars(self, parts: Any) -> Any:
        scalars, amax = zip(*unpack(parts), strict=True)
        largest = None if amax[0] is None else functools.reduce(jnp.maximum, amax)
        return pack((functools.reduce(jnp.add, scalars), largest))

    def _apply(self, state: TrainState, totals: Any, scalars: Any, errors: Any) -> Any:
        feedback = unpack(errors)
        sums, amax = unpack(scalars)
        return apply_sums(
            state,
            SiteSums(
                self.part.join(unpack(totals)),
                sums,
                amax,
                None if feedback[0] is None else self.part.join(feedback),
            ),
            layouts=self.layouts,
            plan=self.plan,
            optimizer=self._optimizer,
            schedule=self._schedule,
        )
