"""Times of the pieces of a model on the devices of one pipeline stage, in every site.

The pieces are those of a `geojax.models.chunk` for one microbatch: a layer forwards, backwards to
its input, backwards to its weights, backwards to both; embedding and head. Every group of devices
that would be a stage works at the same time, as in training. A piece runs many times in a loop of
one program, whose length is an argument: what a longer loop takes longer is the piece's. Loops grow
until that lasts, so that a busy host does not make a piece free.
"""

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.collectives.axes import vary_over, zeros_of
from geojax.errors import UserError
from geojax.mesh import AXES, make_mesh
from geojax.models import AnyModel, OwnModel, init_parameters
from geojax.models.chunk.chunk import ChunkWeights
from geojax.models.chunk.layer_io import StackedGradients
from geojax.models.transformer import read_by_head
from geojax.pipeline.simulation.stage_times import PieceTimes, SiteTimes, StageTimes
from geojax.precision import attach_amax
from geojax.probe.context import ProbeContext
from geojax.probe.exchange import TIMEOUT_SECONDS, collect
from geojax.runtime import Watchdog, WatchdogSettings, barrier
from geojax.sharding import leaf_layouts
from geojax.step.amax_history import history_layouts, prev_amax
from geojax.step.forward_backward import ForwardBackward
from geojax.step.gather import gather_weights
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, batch_specs
from geojax.step.state import parameter_layouts

_ROUNDS = 5
_LOOP_SECONDS = 0.2
_SHORTEST, _LONGEST = 2, 2**20
_LARGEST_GROWTH = 32

Body = Callable[[jax.Array, Any], Any]
"""The body of a loop over a piece: (zero, carry) to carry. No compiler knows that the zero is one,
so that none moves the piece out of the loop."""


def measured_stages(
    model: AnyModel,
    plan: StepPlan,
    context: ProbeContext,
    *,
    sequences: int,
    sequence_length: int,
) -> StageTimes:
    """Measure the pieces of `model`; every process of the job calls it.

    Args:
        model: of whose pieces the times are wanted.
        plan: a step without a pipeline, on a mesh from `stage_mesh`.
        context: the processes and their devices, all of which take part.
        sequences: sequences of a microbatch on one data-parallel rank.
        sequence_length: tokens of a sequence.

    Raises:
        MissingProcessesError: some process did not come.
    """
    pieces = _Pieces(model, plan, sequences, sequence_length)
    programs = {
        (piece, kind): pieces.compiled(piece, kind)
        for piece in ("layer", "embedding", "head")
        for kind in ("forward", "backward", "weight")
        if (piece, kind) != ("embedding", "backward")
    }
    programs["layer", "whole_backward"] = pieces.compiled("layer", "whole_backward")
    # Some collectives time out when their ranks start far apart: all compile, then wait here.
    barrier("probe: the pieces of the model are compiled", TIMEOUT_SECONDS)
    limits = WatchdogSettings(first_step_seconds=TIMEOUT_SECONDS, minimum_seconds=TIMEOUT_SECONDS)
    with Watchdog(limits) as watchdog, watchdog.step(0, "probe"):
        own = _seconds([functools.partial(run, *pieces.arguments) for run in programs.values()])
    answers = [json.loads(text) for text in collect("pieces", json.dumps(own))]
    sites = []
    for site in context.topology.sites:
        members = site.processes or (0,)
        medians = [
            statistics.median(answers[member][index] for member in members)
            for index in range(len(programs))
        ]
        sites.append(_site_times(site.name, dict(zip(programs, medians, strict=True))))
    return StageTimes(
        model=model,
        sequences=sequences,
        sequence_length=sequence_length,
        dtype=plan.policy.compute_dtype.name,
        remat=plan.layout.remat,
        parallelism=plan.parallelism,
        sites=tuple(sites),
    )


def stage_mesh(
    context: ProbeContext, *, expert: int = 1, context_parallel: int = 1, tensor: int = 1
) -> Mesh:
    """Make a mesh of all devices in groups as large as a stage; `data` counts a site's groups.

    Raises:
        UserError: the devices do not divide into stages.
    """
    devices = expert * context_parallel * tensor
    sites = len(context.topology.sites)
    devices_of_site = context.mesh.size // sites
    if devices_of_site % devices:
        raise UserError(
            f"a stage of expert={expert} x context={context_parallel} x tensor={tensor} needs "
            f"{devices} devices, and a site has {devices_of_site}. Leave the check 'stages' out, "
            f"or probe with a multiple of {devices}"
        )
    return make_mesh(
        context.topology if len(context.processes) > 1 else None,
        dc=sites,
        data=devices_of_site // devices,
        expert=expert,
        context=context_parallel,
        tensor=tensor,
        devices=list(context.mesh.devices.flat),
    )


def _site_times(name: str, seconds: dict[tuple[str, str], float]) -> SiteTimes:
    """Take the measured times apart: a head's backward contains its forward, and so on."""
    head = [seconds["head", kind] for kind in ("forward", "backward", "weight")]
    embedding = [seconds["embedding", kind] for kind in ("forward", "weight")]
    return SiteTimes(
        name=name,
        layer=PieceTimes(
            forward=seconds["layer", "forward"],
            backward=seconds["layer", "backward"],
            weight=seconds["layer", "weight"],
        ),
        layer_whole_backward=seconds["layer", "whole_backward"],
        embedding=PieceTimes(
            forward=embedding[0], backward=0.0, weight=max(embedding[1] - embedding[0], 0.0)
        ),
        head=PieceTimes(
            forward=head[0],
            backward=max(head[1] - head[0], 0.0),
            weight=max(head[2] - max(head[1], head[0]), 0.0),
        ),
    )


def _seconds(loops: Sequence[Callable[[jax.Array], Any]]) -> list[float]:
    """Measure one iteration of each loop: medians of some rounds, longer than the noise."""

    def lasts(loop: Callable[[jax.Array], Any], count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(jnp.int32(count)))
        return time.perf_counter() - start

    def iterations(loop: Callable[[jax.Array], Any], count: int) -> float:
        return lasts(loop, count) - lasts(loop, 0)

    for loop in loops:
        lasts(loop, _SHORTEST)
    counts = dict.fromkeys(range(len(loops)), _SHORTEST)
    seconds = [0.0] * len(loops)
    while counts:
        rounds = [
            [iterations(loops[index], count) for index, count in counts.items()]
            for _ in range(_ROUNDS)
        ]
        medians = list(map(statistics.median, zip(*rounds, strict=True)))
        for (index, count), median in zip(counts.items(), medians, strict=True):
            seconds[index] = max(median / count, 0.0)
        # In a loop with messages all processes must run as many iterations.
        answers = map(json.loads, collect("iterations", json.dumps(medians)))
        fastest = map(min, zip(*answers, strict=True))
        counts = {
            index: min(count * _growth(lasted), _LONGEST)
            for (index, count), lasted in zip(counts.items(), fastest, strict=True)
            if lasted < _LOOP_SECONDS and count < _LONGEST
        }
    return seconds


def _growth(lasted: float) -> int:
    """Return the factor by which a loop that lasted too short a time is to be longer."""
    return min(math.ceil(1.25 * _LOOP_SECONDS / max(lasted, 1e-9)), _LARGEST_GROWTH)


class _Pieces:
    """A model with one layer, its data, and the loops over each of its pieces."""

    def __init__(self, model: AnyModel, plan: StepPlan, sequences: int, sequence_length: int):
        self._plan = plan
        key = jax.random.key(0)
        self._run = ForwardBackward(model, plan, key if model.is_random else None)
        self._functions = self._run.whole_model.functions
        middle = model.num_stacked_layers // 2
        one_layer = self._run.chunk(range(middle, middle + 1))
        self._chunk = dataclasses.replace(one_layer, is_first=False, is_last=False)
        if isinstance(model, OwnModel):
            raise UserError(
                "geojax probe times stages of geojax's families; leave the check 'stages' out for "
                "a model of your own (model.module)"
            )
        single = model.with_stacked_layers(1)
        self._layouts = parameter_layouts(single, plan)
        histories = history_layouts(single, plan)
        groups = plan.mesh.shape["dc"] * plan.mesh.shape["data"] * plan.mesh.shape["expert"]
        shapes = batch_shape(sequences * groups, sequence_length)
        layout_trees = (self._layouts, histories)
        self._specs = (
            *(jax.tree.map(lambda leaf_layout: leaf_layout.spec(), each) for each in layout_trees),
            batch_specs(shapes, plan),
        )

        def make(key: jax.Array) -> tuple[Any, Any, Any]:
            parameters = init_parameters(single, key, plan.policy.master_dtype)
            padded = jax.tree.map(
                lambda leaf, leaf_layout: leaf_layout.pad(leaf), parameters, self._layouts
            )
            history = jax.tree.map(
                lambda leaf_layout: jnp.ones(leaf_layout.padded_shape), histories
            )
            tokens = jax.random.randint(key, shapes["tokens"].shape, 0, model.vocab_size)
            columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
            batch = {
                "tokens": tokens,
                "targets": tokens,
                "loss_mask": jnp.ones(tokens.shape, shapes["loss_mask"].dtype),
                "segment_ids": jnp.ones_like(tokens),
                "positions": columns,
                "row": jnp.arange(tokens.shape[0]),
            }
            return padded, history, jax.tree.map(lambda x, s: x.astype(s.dtype), batch, shapes)

        shardings = (
            *(leaf_layouts.shardings(each, plan.mesh) for each in layout_trees),
            jax.tree.map(
                lambda spec: NamedSharding(plan.mesh, spec),
                self._specs[2],
                is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
            ),
        )
        self.arguments = jax.jit(make, out_shardings=shardings)(key)
        """Weights, amax history and a microbatch of every group of devices."""

    def compiled(self, piece: str, kind: str) -> Any:
        """Compile a loop over the piece: (*arguments, iterations) to a number of each device."""

        def program(shards: Any, history: Any, batch: Any, iterations: jax.Array) -> jax.Array:
            weights = gather_weights(shards, self._layouts, self._plan)
            layers = attach_amax(weights["layers"], prev_amax(history, self._plan))
            last = read_by_head(weights, self._run.model)
            of_chunk = self._chunk.stacked_weights(weights["embedding"], layers, last)
            body, start = getattr(self, f"_{piece}")(kind, of_chunk, batch)

            def iteration(index: jax.Array, carry: Any) -> Any:
                return body((index > iterations).astype(jnp.int32), carry)

            end = lax.fori_loop(jnp.int32(0), iterations, iteration, start)
            first_numbers = sum(
                leaf.ravel()[:1].astype(jnp.float32) for leaf in jax.tree.leaves(end)
            )
            return vary_over(first_numbers, frozenset(AXES))

        mapped = jax.shard_map(
            program,
            mesh=self._plan.mesh,
            in_specs=(*self._specs, PartitionSpec()),
            out_specs=PartitionSpec(AXES),
        )
        arguments = (*self.arguments, jnp.int32(0))
        return jax.jit(mapped).lower(*arguments).compile(self._plan.compiler_options)

    def _layer(self, kind: str, weights: ChunkWeights, batch: Any) -> tuple[Body, Any]:
        """Time a chunk of one layer, from the middle of the model."""
        chunk = self._chunk
        context = self._functions.context(batch)
        x = self._functions.embed(weights.first, batch)
        if kind == "forward":

            def forward(zero: jax.Array, carry: Any) -> Any:
                made = chunk.forward(weights, carry[0], batch, context)
                return made.x, jax.tree.leaves(made.residuals)

            shapes = jax.eval_shape(forward, jnp.int32(0), (x,))
            return forward, (x, zeros_of(shapes[1]))
        residuals = chunk.forward(weights, x, batch, context).residuals
        sink = StackedGradients(self._plan.policy.reduce_dtype)
        layer, _ = weights.layers[0].source.take(None, jnp.int32(0), jnp.int32(0))
        if kind == "whole_backward":

            def whole_backward(zero: jax.Array, carry: Any) -> Any:
                own, (cotangent, sums) = _unknown(residuals, zero), carry
                made = chunk.backward(weights, own, cotangent, batch, context, sink, sums)
                return made.x, made.layers

            return whole_backward, (x, sink.start(layer, 1))
        if kind == "backward":

            def backward(zero: jax.Array, carry: Any) -> Any:
                own = _unknown(residuals, zero)
                made = chunk.input_gradient(weights, own, carry[0], batch, context)
                return made.x, jax.tree.leaves(made.layers)

            shapes = jax.eval_shape(backward, jnp.int32(0), (x,))
            return backward, (x, zeros_of(shapes[1]))
        stashed = chunk.input_gradient(weights, residuals, x, batch, context).layers

        def weight(zero: jax.Array, sums: Any) -> Any:
            kept, own = _unknown((residuals, stashed), zero)
            return chunk.weight_gradients(weights, kept, own, context, sink, sums)

        return weight, sink.start(layer, 1)

    def _head(self, kind: str, weights: ChunkWeights, batch: Any) -> tuple[Body, Any]:
        """Time the head forwards, and back to the stream, and also to the weights."""
        last, head = weights.last, self._functions.head

        def run(x: jax.Array) -> Any:
            if kind == "forward":
                return head(last, x, batch)
            if kind == "backward":
                return _gradient(lambda x: head(last, x, batch), x)
            return _gradient(lambda last, x: head(last, x, batch), last, x)

        return _repeated(run, self._functions.embed(weights.first, batch))

    def _embedding(self, kind: str, weights: ChunkWeights, batch: Any) -> tuple[Body, Any]:
        """Time the look-up, and the gradient of the tables."""

        def run(tokens: jax.Array) -> Any:
            x, backward = jax.vjp(
                lambda first: self._functions.embed(first, batch | {"tokens": tokens}),
                weights.first,
            )
            return x if kind == "forward" else backward(x)

        return _repeated(run, batch["tokens"])


def _unknown(tree: Any, zero: jax.Array) -> Any:
    """Return `tree` in a form that no compiler can move out of the loop."""
    return jax.tree.map(lambda leaf: lax.optimization_barrier((leaf, zero))[0], tree)


def _gradient(function: Callable[..., jax.Array], *arguments: Any) -> Any:
    value, backward = jax.vjp(function, *arguments)
    return backward(jnp.ones_like(value))


def _repeated(run: Callable[[jax.Array], Any], argument: jax.Array) -> tuple[Body, Any]:
    """Make a body that runs on the same argument in every iteration, and the first carry."""

    def body(zero: jax.Array, _: Any) -> Any:
        return run(argument + zero.astype(argument.dtype))

    return body, zeros_of(jax.eval_shape(run, argument))
