"""The memory that a step takes on one device: the estimate, and the compiler's account.

State, gathered weights and sums of gradients follow from the layouts of the leaves. What a layer,
the head and the embedding need is read off one trace of each (`geojax.planner.step_pieces`).
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from geojax.hlo import Traffic
from geojax.models import AnyModel, parameter_kinds
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline.execution.ring_pool import residual_rows
from geojax.planner.memory_phases import (
    GradientBytes,
    StepMemory,
    phases_of_stage,
    phases_of_step,
)
from geojax.planner.step_pieces import step_pieces
from geojax.planner.step_traffic import step_traffic
from geojax.runtime.platform import Platform, platform_of
from geojax.sharding import LeafLayout
from geojax.step.early_reduce import pieces as parts_of
from geojax.step.gather import without_layers
from geojax.step.plan import StepPlan
from geojax.step.program import trace_step
from geojax.step.stage_layers import adds_in_products
from geojax.step.state import TrainState, state_layouts

STATE_USES = {
    "parameters": "master weights",
    "frozen": "frozen weights",
    "optimizer": "optimizer moments",
    "error_feedback": "error feedback",
}
"""Uses of the training state, by the field of `TrainState`."""


def step_memory(
    model: AnyModel,
    plan: StepPlan,
    layouts: TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> StepMemory:
    """Estimate the memory that a step of one program takes on a device; none is touched.

    Args:
        model: the model.
        plan: how the step runs.
        layouts: from `abstract_layouts`.
        batch: the global batch as shapes.
    """
    pieces, gradients = step_pieces(model, plan, batch), gradient_bytes(model, plan, layouts)
    state = state_bytes(layouts)
    state["batch, counters"] += _batch_bytes(batch, plan)
    staged, program = plan.staged_layers, plan.tick_program
    if staged is None or program is None:
        phases = phases_of_step(plan.layout, model.num_stacked_layers, pieces, gradients)
    else:
        schedule, of_chunks = program.ticks.schedule, staged.layers_per_chunk
        if schedule.split_backward:
            activations = max(schedule.most_held(of_chunks, pieces.held))
        else:
            activations = residual_rows(program, of_chunks) * pieces.held.before_backward
        layers = len(staged.layers_of_stage[0])
        phases = phases_of_stage(
            layers,
            activations,
            pieces,
            gradients,
            holds_chunks=program.holds_chunks(of_chunks),
            adds_in_products=adds_in_products(model, plan.policy, staged.placement.stages),
        )
    return StepMemory.of(state, phases)


def state_bytes(layouts: TrainState) -> Counter[str]:
    """Return the bytes of the training state on one device, by their use."""
    held: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(layouts):
        use = STATE_USES.get(path[0].name) if leaf.shard_shape else None
        held[use or "batch, counters"] += _bytes([leaf], "shard_shape", leaf.dtype)
    return held


def gradient_bytes(model: AnyModel, plan: StepPlan, layouts: TrainState) -> GradientBytes:
    """Count the gradients of the trained leaves."""
    dtype, parameters = plan.policy.reduce_dtype, layouts.parameters
    layers = jax.tree.leaves(parameters["layers"])
    others = jax.tree.leaves(without_layers(parameters))
    of_others = _bytes(others, "gathered_shape", dtype)
    if plan.staged_layers is not None and model.head_reads_tokens:
        of_others += _bytes(jax.tree.leaves(parameters["embedding"]), "gathered_shape", dtype)
    return GradientBytes(
        layers=_bytes(layers, "gathered_shape", dtype),
        others=of_others,
        layer_shards=_bytes(layers, "shard_shape", dtype),
        other_shards=_bytes(others, "shard_shape", dtype),
        largest=max(_bytes([leaf], "gathered_shape", dtype) for leaf in (*layers, *others)),
        has_errors=layouts.error_feedback is not None,
        early=_early_bytes(parameters, plan),
    )


def _early_bytes(parameters: Any, plan: StepPlan) -> int:
    """Return the bytes of the largest part of a pipeline's gradients that leaves early."""
    if plan.tick_program is None or not plan.overlap_grad_reduce:
        return 0
    dtype = plan.policy.reduce_dtype
    parts = (
        _bytes(list(leaves.values()), "model_shard_shape", dtype)
        for part, leaves in parts_of(parameters, plan).items()
        if part != "rest"
    )
    return max(parts, default=0)


def _bytes(leaves: list[LeafLayout], shape: str, dtype: Any) -> int:
    return sum(math.prod(getattr(leaf, shape)) * dtype.itemsize for leaf in leaves)


def _batch_bytes(batch: Mapping[str, jax.ShapeDtypeStruct], plan: StepPlan) -> int:
    """Return the bytes of a device's part of the batch."""
    rows = math.prod(plan.mesh.shape[axis] for axis in plan.batch_axes)
    parts = {1: rows, 2: rows * plan.mesh.shape["context"]}
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // parts[leaf.ndim] for leaf in batch.values()
    )


def abstract_layouts(model: AnyModel, plan: StepPlan, settings: OptimizerSettings) -> TrainState:
    """Lay out the state of a run's steps; JAX would put even a constant of it on a device."""
    made: list[TrainState] = []
    optimizer = make_optimizer(settings, 1, parameter_kinds(model))
    jax.eval_shape(lambda: made.append(state_layouts(model, optimizer, plan)))
    return made[0]


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A training step traced for a mesh, which may be one without devices."""

    model: AnyModel
    plan: StepPlan
    layouts: TrainState
    program: jax.stages.Traced
    batch: Mapping[str, jax.ShapeDtypeStruct]
    """The global batch as shapes."""

    @classmethod
    def of(
        cls,
        model: AnyModel,
        plan: StepPlan,
        settings: OptimizerSettings,
        steps: int,
        batch: Mapping[str, jax.ShapeDtypeStruct],
    ) -> "TracedStep":
        """Trace the step; no device is touched.

        Args:
            model: the model.
            plan: how the step runs.
            settings: the optimizer and its schedule.
            steps: length of the run.
            batch: the global batch as shapes, from `geojax.step.program.batch_shape`.
        """
        optimizer = make_optimizer(settings, steps, parameter_kinds(model))
        schedule = learning_rate_schedule(settings, steps)
        layouts = abstract_layouts(model, plan, settings)
        program = trace_step(layouts, model, plan, optimizer, schedule, batch)
        return cls(model, plan, layouts, program, batch)

    @property
    def platform(self) -> Platform:
        """The platform that the step is meant for."""
        return platform_of(self.plan.mesh)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The program as the compiler takes it."""
        return self.program.lower()

    @functools.cached_property
    def memory(self) -> StepMemory:
        """The estimated memory of a device."""
        return step_memory(self.model, self.plan, self.layouts, self.batch)

    @property
    def unneeded_bytes(self) -> Counter[str]:
        """The bytes of a device that embedding and head take on stages that do not need them.

        One program runs on all stages of a pipeline: each gathers their weights and sums their
        gradients.
        """
        held: Counter[str] = Counter()
        policy = self.plan.policy
        gathered = without_layers(self.layouts.weights), policy.compute_dtype
        summed = without_layers(self.layouts.parameters), policy.reduce_dtype
        for layouts, dtype in (gathered, summed):
            for path, leaf in jax.tree_util.tree_leaves_with_path(layouts):
                if leaf.stages is not None and len(leaf.stages.holders) < leaf.stages.stages:
                    use = "embedding" if path[0].key == "embedding" else "head"
                    held[use] += math.prod(leaf.model_shard_shape) * dtype.itemsize
        return held

    @functools.cached_property
    def traffic(self) -> Traffic:
        """The collectives of the step."""
        return step_traffic(self.program, self.plan)


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """The bytes that one device holds, as the compiler laid them out (`memory_analysis`)."""

    arguments: int
    """State and batch."""
    results: int
    """Results that do not take an argument's place."""
    temporaries: int
    """Everything else, at the step's peak."""
    attention: int = 0
    """Workspace of attention's kernel, of which a compile without a GPU does not know."""

    @classmethod
    def of(cls, program: jax.stages.Compiled, *, attention: int = 0) -> "CompiledMemory":
        """Read the compiler's analysis of any compiled program."""
        analysis = program.memory_analysis()
        assert analysis is not None, "the backend must analyze the memory of its programs"
        return cls(
            arguments=analysis.argument_size_in_bytes,
            results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
            attention=attention,
        )

    @property
    def bytes(self) -> int:
        """All bytes together."""
        return self.arguments + self.results + self.temporaries + self.attention
