"""The memory that a training step takes on one device, from its program alone.

The step is traced over a mesh without devices, and its buffers are followed through the trace
(`geojax.planner.live_bytes`). The table therefore describes the very program that a run compiles.
No layout, ZeRO stage or rematerialization needs a formula. State that is held between steps comes
from the layouts.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from geojax.hlo import Traffic
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.flat_program import Buffer, FlatProgram, Operation, flatten
from geojax.planner.live_bytes import (
    XLA_ACCELERATOR,
    XLA_CPU,
    Accounting,
    Compiler,
    Snapshot,
    peaks,
)
from geojax.planner.step_traffic import step_traffic
from geojax.runtime.platform import Platform, platform_of
from geojax.sharding import LeafLayout
from geojax.step.plan import StepPlan
from geojax.step.program import trace_evaluation, trace_step
from geojax.step.state import TrainState, state_layouts
from geojax.step.weight_sources import without_layers

Result = TypeVar("Result")

KINDS = (
    "master weights",
    "frozen weights",
    "optimizer moments",
    "error feedback",
    "gathered weights",
    "gradients",
    "activations",
    "head and loss",
    "layer workspace",
    "communication",
    "optimizer update",
    "batch, counters",
)
"""Uses of memory, in the order of a table; the layer workspace is what one layer's
forward or backward pass needs while it runs."""

STATE_KINDS = {
    "parameters": "master weights",
    "frozen": "frozen weights",
    "optimizer": "optimizer moments",
    "error_feedback": "error feedback",
}
"""Uses of the training state, by the field of `TrainState`."""

EVALUATION = "evaluate"
"""The phase of the validation pass, a program of its own."""

PHASES = {
    "gather_weights": "gather",
    "forward_layers": "forward",
    "head": "head",
    "backward_layers": "backward",
    "reduce_gradients": "reduce",
    "step_gradients": "embed",
    "": "update",
    "evaluation": EVALUATION,
}
"""The phases of a step by the scope in its program; outer scopes go before inner ones."""

PIPELINE = "pipeline"
"""The phase of a pipeline's ticks, which hold forward and backward passes."""


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The bytes that one device holds while a step runs."""

    phases: dict[str, Snapshot]
    """The peak of each phase of the step, by its name."""

    @property
    def phase(self) -> str:
        """The phase in which most is held."""
        return max(self.phases, key=lambda name: self.phases[name].bytes)

    @property
    def bytes(self) -> int:
        """The bytes held at the peak of the step."""
        return self.phases[self.phase].bytes

    @property
    def by_kind(self) -> Counter[str]:
        """The bytes held at the peak of the step, by their use."""
        return self.phases[self.phase].by_kind


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A training step traced for a mesh, which may be one without devices."""

    model: ModelConfig
    plan: StepPlan
    layouts: TrainState
    program: jax.stages.Traced
    batch: Mapping[str, jax.ShapeDtypeStruct]
    """The global batch as shapes."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
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
        optimizer = make_optimizer(settings, steps)
        schedule = learning_rate_schedule(settings, steps)
        layouts = _abstractly(lambda: state_layouts(model, optimizer, plan))
        program = trace_step(layouts, model, plan, optimizer, schedule, batch)
        return cls(model, plan, layouts, program, batch)

    @functools.cached_property
    def evaluation(self) -> jax.stages.Traced:
        """The validation pass on a batch of as many sequences."""
        return trace_evaluation(self.layouts, self.model, self.plan, self.batch)

    @property
    def platform(self) -> Platform:
        """The platform that the step is meant for."""
        return platform_of(self.plan.mesh)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The program as the compiler takes it."""
        return self.program.lower()

    def memory(self, platform: Platform | None = None) -> StepMemory:
        """Estimate the memory that the step and the validation pass take on a device.

        Args:
            platform: the one whose compiler makes programs of them; None, the plan's own.
        """
        compiler = XLA_CPU if (platform or self.platform).host_devices else XLA_ACCELERATOR
        phase = functools.partial(phase_of, pipeline=self.plan.staged_layers is not None)
        found = self._peaks(self.program, phase, compiler, donated=True)
        found |= self._peaks(self.evaluation, lambda _: EVALUATION, compiler, donated=False)
        order = ["gather", PIPELINE, *PHASES.values()]
        phases = {phase: found[phase] for phase in sorted(found, key=order.index)}
        return StepMemory(phases)

    def _peaks(
        self,
        traced: jax.stages.Traced,
        phase: Callable[[Operation], str],
        compiler: Compiler,
        *,
        donated: bool,
    ) -> dict[str, Snapshot]:
        """Return the peak of each phase of a program whose first argument is the state.

        Args:
            traced: the program.
            phase: the phase of each operation.
            compiler: the compiler that lays it out.
            donated: True if the program's first results take the state's place.
        """
        program, arguments = program_of_device(traced.jaxpr.jaxpr)
        leaves = jax.tree_util.tree_leaves_with_path(self.layouts)
        for buffer in program.inputs:
            buffer.kind = "batch, counters"
        for position, (path, leaf) in zip(arguments, leaves, strict=False):
            buffer = program.inputs[position]
            assert buffer.shape == leaf.shard_shape, "the state comes first, in its order"
            if buffer.shape:  # a count is none of these
                buffer.kind = STATE_KINDS.get(path[0].name, buffer.kind)
        accounting = Accounting(_Kinds(self.layouts.parameters).kind, phase, compiler)
        return peaks(
            program, accounting, dict(enumerate(arguments[: len(leaves)])) if donated else None
        )

    @property
    def embedding_and_head_bytes(self) -> int:
        """The bytes that embedding and head take of a device in a pipeline, on any stage.

        One program runs on all stages: each gathers their weights and sums their gradients, though
        only the first and the last stage need them. 0 without a pipeline.
        """
        if self.plan.staged_layers is None:
            return 0
        policy = self.plan.policy
        gathered = without_layers(self.layouts.weights), policy.compute_dtype
        summed = without_layers(self.layouts.parameters), policy.reduce_dtype
        return sum(
            math.prod(leaf.model_shard_shape) * dtype.itemsize
            for layouts, dtype in (gathered, summed)
            for leaf in jax.tree.leaves(layouts)
        )

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

    @classmethod
    def of(cls, program: jax.stages.Compiled) -> "CompiledMemory":
        """Read the compiler's analysis of any compiled program."""
        analysis = program.memory_analysis()
        assert analysis is not None, "the backend must analyze the memory of its programs"
        return cls(
            arguments=analysis.argument_size_in_bytes,
            results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
        )

    @property
    def bytes(self) -> int:
        """All bytes together."""
        return self.arguments + self.results + self.temporaries


def phase_of(operation: Operation, *, pipeline: bool = False) -> str:
    """Return the phase of a step that an operation belongs to.

    With a `pipeline` the loop over ticks holds all forward and backward passes: one phase.
    """
    named = [scope for scope in operation.scopes if scope in PHASES]
    inner = [scope for scope in named if scope != "step_gradients"]
    phase = PHASES[(inner or named or [""])[0]]
    in_ticks = pipeline and phase in ("embed", "forward", "head", "backward")
    return PIPELINE if in_ticks else phase


class _Kinds:
    def __init__(self, parameters: Any):
        leaves = jax.tree.leaves(parameters)
        self._of_weights = {
            _without_ones(shape)
            for leaf in (*leaves, *map(LeafLayout.of_layer, jax.tree.leaves(parameters["layers"])))
            for shape in (leaf.shard_shape, leaf.model_shard_shape, leaf.gathered_shape)
        }

    def kind(self, operation: Operation, buffer: Buffer) -> str:
        """Return the use of a buffer that `operation` makes."""
        if not buffer.shape:
            return "batch, counters"
        scopes = operation.scopes
        innermost = next((scope for scope in reversed(scopes) if scope in PHASES), "")
        of_a_weight = _without_ones(buffer.shape) in self._of_weights
        in_loop = innermost != "" and scopes[-1] in ("scan", "while", "body")
        if innermost == "gather_weights":
            return "gathered weights"
        if innermost == "reduce_gradients":
            return "gradients" if of_a_weight else "communication"
        if innermost == "":
            return "optimizer update"
        if of_a_weight and innermost != "forward_layers" and not in_loop:
            return "gradients"
        if innermost == "head":
            return "head and loss"
        if innermost in ("step_gradients", "evaluation") or (
            innermost == "forward_layers" and not in_loop
        ):
            return "activations"
        return "layer workspace"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop dims of one entry: a loop over layers may work on groups of one."""
    return tuple(size for size in shape if size > 1)


def _abstractly(make: Callable[[], Result]) -> Result:
    """Call `make` with abstract arrays: JAX would put even a constant on a device."""
    made: list[Result] = []
    jax.eval_shape(lambda: made.append(make()))
    return made[0]


def program_of_device(jaxpr: Any) -> tuple[FlatProgram, list[int]]:
    """Return the program of each device, and the positions of the step's arguments in its inputs.

    Its other inputs are constants, which JAX hands to a `shard_map` from outside.
    """
    equations = [each for each in jaxpr.eqns if each.primitive.name == "shard_map"]
    assert len(equations) == 1, "a step is one shard_map"
    (equation,) = equations
    assert equation.outvars == jaxpr.outvars, "the results of a step are those of its shard_map"
    program = flatten(equation.params["jaxpr"])
    return program, [equation.invars.index(variable) for variable in jaxpr.invars]
