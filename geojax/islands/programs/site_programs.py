"""The compiled programs of a site: each a `jax.jit` of a `shard_map` over the site's mesh.

gather      state ─► weights of all chunks, in the compute dtype
forward     weights, stream, batch ─► stream, residuals
backward    weights, residuals, cotangent, batch, sums ─► cotangent, sums
reduce      sums ─► the site's shards of a bucket, encoded
divide      stream ─► each rank's part of it, where ranks share it; `whole` inverts it
add         buckets of all sites ─► total
apply       state, totals ─► state, metrics
forward_only, validation_sums: forwards without residuals, and [losses, targets]
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from geojax.islands.actions import Bucket, Message
from geojax.islands.programs.chunk_passes import ChunkPasses
from geojax.islands.programs.per_rank import RANKS, is_shared, on_packed
from geojax.islands.programs.shared import divide, is_divided, whole
from geojax.islands.programs.site_part import SitePart
from geojax.islands.programs.site_sums import SumsOfSites
from geojax.islands.programs.values import (
    ChunkParameters,
    ChunkSums,
    PassInputs,
    Reduced,
    SiteWeights,
    StepInputs,
    StepSums,
)
from geojax.models.transformer import read_by_head
from geojax.pipeline.schedule import LayerBytes
from geojax.sharding import LeafLayout, leaf_layouts
from geojax.step.plan import StepPlan
from geojax.step.program import batch_on_mesh, batch_specs, signals_on_mesh
from geojax.step.state import TrainState, initial_state, parameter_layouts


class StepBytes(NamedTuple):
    """Bytes that a step holds on each device, beside the state."""

    weights: int
    """Gathered weights, and the shards of those that passes gather."""
    gradients: int
    """Sums over microbatches, and those of all sites."""
    messages: int
    """Offers of this step and of the one before, which others may still fetch, and what comes
    from each other site. Where sites go on without one that is lost: those of all shares that a
    site may come to compute, and the sums of the last step, which others may lack."""
    of_microbatch: int
    """Values that a microbatch keeps in all chunks between its forwards and its backwards."""
    of_pass: int
    """Weights of two layers, where every pass gathers them for itself (ZeRO 3); else 0."""

    @property
    def always(self) -> int:
        """Bytes that do not depend on the microbatches that are held."""
        return self.weights + self.gradients + self.messages + self.of_pass


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
        self.part, self.plan, self.layouts, self._batch = part, plan, layouts, batch
        self._optimizer = optimizer
        passes = ChunkPasses(part, plan, layouts.parameters)
        sums = SumsOfSites(passes, layouts, optimizer, schedule)
        state = jax.tree.map(lambda leaf_layout: leaf_layout.spec(), layouts)
        replicated, ranks = PartitionSpec(), RANKS
        inputs = StepInputs(batch_specs(batch, plan), replicated, replicated, replicated)
        program, of_chunks = self._program, self._of_chunks
        self._input_specs, self._passes = inputs, passes
        given = PassInputs(ranks, ranks, ranks, inputs, replicated)
        self.gather = program(passes.gather, (state.parameters, state.amax_history))
        self.start = of_chunks(passes.start, (ranks, inputs))
        self.forward = of_chunks(passes.forward, (given,))
        self.backward = of_chunks(passes.backward, (given, ranks), donate=(1,))
        first_half = functools.partial(passes.backward, is_split=True)
        self.input_gradient = of_chunks(first_half, (given, ranks), donate=(1,))
        self.weight_gradients = of_chunks(passes.weight_gradients, (given, ranks), donate=(1,))
        self.forward_only = of_chunks(passes.forward_only, (given,))
        self.validation_sums = program(passes.validation_sums, (ranks, inputs), replicated)
        self._divide = program(on_packed(divide), (ranks,))
        self._whole = program(on_packed(whole), (ranks,))
        self.reduce = of_chunks(sums.reduce, (ranks, ranks, state.error_feedback, inputs))
        self.reduce_scalars = program(sums.reduce_scalars, (ranks, ranks, inputs, plan.signal_spec))
        self.add = of_chunks(sums.add, (ranks,))
        self.add_table = program(sums.add_table, (ranks,))
        self.add_scalars = program(sums.add_scalars, (ranks,))
        self.apply = program(
            sums.apply, (state, ranks, ranks, ranks, ranks), (state, replicated), donate=(0,)
        )

    def initial_state(self, seed: int) -> TrainState:
        """Make the stage's part of the state before the first step."""
        part = self.part
        return initial_state(part.model, self._optimizer, self.layouts, self.plan, seed, part.held)

    def update(self, state: TrainState, sums: StepSums) -> tuple[TrainState, Any]:
        """Update a state, which is donated, by sums in which this site had no part.

        It has neither lost rounding errors of them nor seen an amax of its own.

        Returns:
            The next state and the metrics.
        """
        errors = [each.error_feedback for each in self._traced_reduced.values()]
        _, amax = self._traced_scalars
        sharding = NamedSharding(self.plan.mesh, RANKS)
        own_amax, own_errors = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), (amax, errors)
        )
        made: tuple[TrainState, Any] = self.apply(
            state, sums.totals, sums.scalars, own_amax, own_errors
        )
        return made

    def divide(self, per_rank: Any) -> Any:
        """Return each rank's part of what several ranks hold, as it crosses a link."""
        return self._divide(per_rank) if is_shared(per_rank, self.plan.mesh) else per_rank

    def whole(self, crossed: Any) -> Any:
        """Invert `divide`."""
        return self._whole(crossed) if is_divided(crossed) else crossed

    def chunk_weights(self, weights: SiteWeights, chunk: int) -> ChunkParameters:
        """Return the weights that a chunk reads."""
        non_layer = weights.non_layer_params
        return ChunkParameters(
            non_layer["embedding"] if self.part.is_first(chunk) else {},
            weights.chunks[chunk],
            read_by_head(non_layer, self.part.model) if self.part.is_last(chunk) else {},
        )

    def payload(self, message: Message) -> Any:
        """Return the tree of `jax.ShapeDtypeStruct`s that a message from another site has."""
        sharding = NamedSharding(self.plan.mesh, RANKS)
        match message.kind:
            case "bucket":
                traced = self._traced_sums[message.chunk]
            case "table":
                traced = self._traced_table
            case "scalars" | "site_scalars" | "step_scalars":
                traced = self._traced_sums["scalars"]
            case "activation" | "cotangent":
                traced = self._traced_hop
        return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), traced)

    @property
    def sums(self) -> StepSums:
        """The sums of a step in role data, as trees of `jax.ShapeDtypeStruct`s."""
        sharding = NamedSharding(self.plan.mesh, RANKS)
        scalars = self.add_scalars.eval_shape([self._traced_scalars[0]] * self.plan.islands)
        traced = StepSums(list(self._traced_totals.values()), scalars)
        return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), traced)

    @property
    def message_bytes(self) -> int:
        """The bytes of the buckets and scalars that a site offers to each other one in a step."""
        return self._device_bytes(list(self._traced_sums.values())) * self.plan.mesh.size

    @functools.cached_property
    def step_bytes(self) -> StepBytes:
        """The bytes that a step holds; nothing is computed."""
        forward = [self._traced_forward(chunk) for chunk in self.part.chunks]
        crossing = self._traced_sums
        if not self.part.holds_all:  # its gradients are whole
            crossing = {"scalars": crossing["scalars"]}
        islands, goes_on = self.plan.islands, self.plan.goes_on
        before = self.plan.most_shares
        kept = self._device_bytes(self._traced_totals) if goes_on else 0
        return StepBytes(
            self._device_bytes(self._traced_weights),
            self._device_bytes((self._traced_gradients, self._traced_totals)),
            self._device_bytes([*crossing.values()] * (islands + before)) + kept,
            self._device_bytes(forward),
            self._layers_ahead_bytes,
        )

    @property
    def _layers_ahead_bytes(self) -> int:
        """Bytes of the gathered weights of the layer that is computed and of the next one."""
        if not self.plan.gathers_layer_by_layer:
            return 0
        of_layer = jax.tree.map(LeafLayout.of_layer, self.layouts.parameters["layers"])
        numbers = sum(math.prod(each.gathered_shape) for each in jax.tree.leaves(of_layer))
        return 2 * numbers * self.plan.policy.compute_dtype.itemsize

    @functools.cached_property
    def layer_bytes(self) -> LayerBytes:
        """The bytes that a layer holds of a microbatch, the most of all chunks."""
        of_chunks = []
        for chunk, layers in self.part.chunks.items():
            kept = self._device_bytes(self._traced_forward(chunk))
            _, _, stash = self.input_gradient[chunk].eval_shape(*self._backward_arguments(chunk))
            both = kept + self._device_bytes(stash)
            of_chunks.append([-(-size // len(layers)) for size in (kept, both, both)])
        return LayerBytes(*map(max, zip(*of_chunks, strict=True)))

    @property
    def hop_bytes(self) -> int:
        """The bytes that a device sends to another stage for a microbatch."""
        return self._device_bytes(self._traced_hop)

    def traced(self) -> Iterator[tuple[str, jax.stages.Traced]]:
        """Trace the programs of a step that take most memory, each with its part of the step."""
        state = leaf_layouts.abstract(self.layouts, self.plan.mesh)
        yield "gather", self.gather.trace(state.parameters, state.amax_history)
        for chunk in self.part.chunks:
            forward, backward = self._traced_passes(chunk)
            yield "forward", forward
            yield "backward", backward
        errors = [each.error_feedback for each in self._traced_reduced.values()]
        scalars, amax = self._traced_scalars
        totals = list(self._traced_totals.values())
        own = self.add_scalars.eval_shape([scalars] * self.plan.islands)
        yield "update", self.apply.trace(state, totals, own, amax, errors)

    def compiled_passes(self, chunk: int) -> list[jax.stages.Compiled]:
        """Compile the forward and the backward of a chunk."""
        return [traced.lower().compile() for traced in self._traced_passes(chunk)]

    def _traced_passes(self, chunk: int) -> tuple[jax.stages.Traced, jax.stages.Traced]:
        """Trace the forward and the backward of a chunk."""
        forward = self.forward[chunk].trace(self._forward_inputs(chunk))
        return forward, self.backward[chunk].trace(*self._backward_arguments(chunk))

    def _forward_inputs(self, chunk: int) -> PassInputs:
        """Return the shapes of the arguments of the forward of a chunk; nothing is computed."""
        x = None if self.part.is_first(chunk) else self._traced_stream
        inputs = self._abstract_inputs
        return PassInputs(self._traced_weights[chunk], x, None, inputs, inputs.step)

    def _backward_arguments(self, chunk: int) -> tuple[PassInputs, Any]:
        """Return the same of its backward, and those of the sums."""
        cotangent = None if self.part.is_last(chunk) else self._traced_stream
        sums = None if self.plan.layout.batch.microbatches == 1 else self._traced_gradients[chunk]
        _, kept = self._traced_forward(chunk)
        return self._forward_inputs(chunk)._replace(taken=cotangent, kept=kept), sums

    def _traced_forward(self, chunk: int) -> Any:
        return self.forward[chunk].eval_shape(self._forward_inputs(chunk))

    def _device_bytes(self, per_rank: Any) -> int:
        leaves = jax.tree.leaves(per_rank)
        total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        return total // self.plan.mesh.size

    @functools.cached_property
    def _abstract_inputs(self) -> StepInputs:
        number = jax.ShapeDtypeStruct((), jnp.int32)
        loss_scale = leaf_layouts.abstract(self.layouts.loss_scale, self.plan.mesh)
        return StepInputs(batch_on_mesh(self._batch, self.plan), loss_scale, number, number)

    @functools.cached_property
    def _traced_weights(self) -> dict[int, ChunkParameters]:
        """Shapes of the weights of each chunk; nothing is computed."""
        state = leaf_layouts.abstract(self.layouts, self.plan.mesh)
        weights = self.gather.eval_shape(state.parameters, state.amax_history)
        return {chunk: self.chunk_weights(weights, chunk) for chunk in self.part.chunks}

    @functools.cached_property
    def _traced_gradients(self) -> dict[int, ChunkSums]:
        """Shapes of the sums of each chunk before they are reduced; nothing is computed."""
        return {
            chunk: self.start[chunk].eval_shape(own, self._abstract_inputs)
            for chunk, own in self._traced_weights.items()
        }

    @functools.cached_property
    def _traced_reduced(self) -> dict[int, Reduced]:
        """Shapes of the sums of each chunk over its site; nothing is computed."""
        inputs, sums, part = self._abstract_inputs, self._traced_gradients, self.part
        errors = leaf_layouts.abstract(self.layouts.error_feedback, self.plan.mesh)
        table = part.table_of_head(sums[max(sums)])
        return {
            chunk: self.reduce[chunk].eval_shape(
                own, table if part.is_first(chunk) else {}, errors, inputs
            )
            for chunk, own in sums.items()
        }

    @functools.cached_property
    def _traced_scalars(self) -> Any:
        """Shapes of the scalars as they cross, and of the site's amax; nothing is computed."""
        reduced = self._traced_reduced.values()
        return self.reduce_scalars.eval_shape(
            [each.scalars for each in reduced],
            None if self.part.holds_all else [each.messages for each in reduced],
            self._abstract_inputs,
            signals_on_mesh(self.plan),
        )

    @functools.cached_property
    def _traced_sums(self) -> dict[Bucket, Any]:
        """Shapes of each bucket as it crosses, and of the scalars; nothing is computed."""
        messages: dict[Bucket, Any] = {
            chunk: each.messages for chunk, each in self._traced_reduced.items()
        }
        messages["scalars"], _ = self._traced_scalars
        return messages

    @functools.cached_property
    def _traced_totals(self) -> dict[int, Any]:
        """Shapes of the sums of each chunk over all sites; nothing is computed."""
        messages = {chunk: each.messages for chunk, each in self._traced_reduced.items()}
        if not self.part.holds_all:
            return messages
        sites = self.plan.islands
        return {chunk: self.add[chunk].eval_shape([own] * sites) for chunk, own in messages.items()}

    @functools.cached_property
    def _traced_stream(self) -> Any:
        """Shape of the stream between chunks; nothing is computed."""
        layouts = parameter_layouts(self.part.model, self.plan)["embedding"]
        specs = jax.tree.map(lambda leaf_layout: leaf_layout.spec(), layouts)
        embed = functools.partial(self._passes.embed, layouts)
        program = self._program(embed, (specs, self._input_specs))
        return program.eval_shape(
            leaf_layouts.abstract(layouts, self.plan.mesh), self._abstract_inputs
        )

    @functools.cached_property
    def _traced_hop(self) -> Any:
        """Shape of the stream as it crosses; nothing is computed."""
        return self._divide.eval_shape(self._traced_stream)

    @functools.cached_property
    def _traced_table(self) -> Any:
        """Shape of a tied table's gradient as it crosses; nothing is computed."""
        return self._divide.eval_shape(self.part.table(self._traced_sums))

    def _program(
        self,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any = RANKS,
        donate: tuple[int, ...] = (),
    ) -> Any:
        mapped = jax.shard_map(
            function, mesh=self.plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )
        return jax.jit(mapped, donate_argnums=donate, compiler_options=self.plan.compiler_options)

    def _of_chunks(self, function: Callable[..., Any], in_specs: Any, **options: Any) -> Any:
        """Make a program for each chunk; `function` gets the chunk's number first."""
        return {
            chunk: self._program(_of_chunk(function, chunk), in_specs, **options)
            for chunk in self.part.chunks
        }


def _of_chunk(function: Callable[..., Any], chunk: int) -> Callable[..., Any]:
    """Fix the chunk that `function` gets first, and name its operations by it in profiles."""

    def scoped(*arguments: Any) -> Any:
        with jax.named_scope(f"chunk {chunk}"):
            return function(chunk, *arguments)

    scoped.__name__ = getattr(function, "func", function).__name__
    return scoped
