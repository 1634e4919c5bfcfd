"""What a training step holds in the memory of one device, from its program alone.

The step is traced over a mesh without devices and its buffers are followed through it
(`geojax.planner.live_bytes`), so that the table speaks of the very program that a run compiles:
whatever its layout, ZeRO stage or rematerialisation, no formula is kept beside it. What is
held between steps comes from the layouts of the state.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from geojax.accelerators import Accelerator
from geojax.hlo import collective_traffic
from geojax.mesh import AXES, platform_of, require_sites
from geojax.models import parameter_count
from geojax.optim import LeafLayout, learning_rate_schedule, make_optimizer
from geojax.planner.flat_program import Buffer, FlatProgram, Operation, flatten
from geojax.planner.live_bytes import Accounting, Moment, peaks
from geojax.runtime.xla_flags import expected_platform
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, trace_step
from geojax.step.state import TrainState, state_layouts
from geojax.topology import Topology
from geojax.train.compiled_run import step_plan
from geojax.train.config import RunConfig

Result = TypeVar("Result")

KINDS = (
    "master weights",
    "optimizer moments",
    "wire errors",
    "gathered weights",
    "gradients",
    "activations",
    "head and loss",
    "a layer at work",
    "communication",
    "optimizer update",
    "batch, counters",
)
"""What memory is held for, in the order of a table; a layer at work takes what its forward or
backward pass needs for a while."""

PHASES = {
    "gather_weights": "gather",
    "forward_layers": "forward",
    "head": "head",
    "backward_layers": "backward",
    "reduce_gradients": "reduce",
    "step_gradients": "embed",
    "": "update",
}
"""The phases of a step by the scope in its program; outer scopes go before inner ones."""


@dataclasses.dataclass(frozen=True)
class StepMemory:
    """The bytes that one device holds while a step runs."""

    phases: dict[str, Moment]
    """For each phase of the step what is held when it holds most."""
    parameters: int
    """Of the whole model."""

    @property
    def phase(self) -> str:
        """In which most is held."""
        return max(self.phases, key=lambda name: self.phases[name].bytes)

    @property
    def bytes(self) -> int:
        """What is held then."""
        return self.phases[self.phase].bytes

    @property
    def by_kind(self) -> Counter[str]:
        """What it is held for."""
        return self.phases[self.phase].by_kind


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """The step of a config on a mesh without devices."""

    config: RunConfig
    plan: StepPlan
    layouts: TrainState
    program: jax.stages.Traced

    @classmethod
    def of(cls, config: RunConfig) -> "TracedStep":
        """Trace the step of `config`; no device is touched.

        Raises:
            UserError: dc is not the number of the topology's sites.
        """
        if config.topology is not None:
            require_sites(Topology.load(config.topology), config.mesh.dc)
        plan = step_plan(config, cast(Mesh, _mesh_without_devices(config)))
        optimizer = make_optimizer(config.optimizer, config.steps)
        layouts = _abstractly(lambda: state_layouts(config.model, optimizer, plan))
        schedule = learning_rate_schedule(config.optimizer, config.steps)
        batch = batch_shape(config.batch.rows, config.batch.sequence)
        program = trace_step(layouts, config.model, plan, optimizer, schedule, batch)
        return cls(config, plan, layouts, program)

    @property
    def on_cpu(self) -> bool:
        """Whether the step is meant for (simulated) CPU devices."""
        return platform_of(self.plan.mesh) == "cpu"

    def memory(self, *, on_cpu: bool | None = None) -> StepMemory:
        """What a device holds.

        Args:
            on_cpu: whether to count what XLA for CPUs makes of the program: it orders operations
                breadth first and computes 16-bit floats as 32-bit ones. None: if it is for CPUs.
        """
        cpu = self.on_cpu if on_cpu is None else on_cpu
        program, arguments = _of_one_device(self.program.jaxpr.jaxpr)
        leaves = jax.tree_util.tree_leaves_with_path(self.layouts)
        for buffer in program.inputs:
            buffer.kind = "batch, counters"
        for position, (path, leaf) in zip(arguments, leaves, strict=False):
            buffer = program.inputs[position]
            assert buffer.shape == leaf.shard_shape, "the state comes first, in its order"
            kinds = {
                "parameters": "master weights",
                "optimizer": "optimizer moments",
                "wire_errors": "wire errors",
            }
            if buffer.shape:  # a count is none of these
                buffer.kind = kinds.get(path[0].name, buffer.kind)
        accounting = Accounting(
            _Kinds(self.layouts.parameters).kind,
            phase_of,
            breadth_first=cpu,
            wide=cpu,
            wide_stacks=cpu and jax.__version_info__ < (0, 11),
        )
        # The new state takes the old one's place.
        donated = dict(enumerate(arguments[: len(leaves)]))
        return StepMemory(peaks(program, accounting, donated), parameter_count(self.config.model))

    def bytes_across_sites(self) -> int:
        """What a device sends over the link in one step, as the program is written."""
        traffic = collective_traffic(
            self.program.lower(lowering_platforms=("cpu",)), self.plan.mesh
        )
        return int(traffic.bytes_over("dc"))


def phase_of(operation: Operation) -> str:
    """The phase of a step that an operation belongs to."""
    named = [scope for scope in operation.scopes if scope in PHASES]
    inner = [scope for scope in named if scope != "step_gradients"]
    return PHASES[(inner or named or [""])[0]]


class _Kinds:
    def __init__(self, parameters: Any):
        leaves = jax.tree.leaves(parameters)
        self._of_weights = {
            _without_ones(shape)
            for leaf in (*leaves, *map(LeafLayout.of_layer, jax.tree.leaves(parameters["layers"])))
            for shape in (leaf.shard_shape, leaf.part_shape, leaf.gathered_shape)
        }

    def kind(self, operation: Operation, buffer: Buffer) -> str:
        """What a buffer that `operation` makes is held for."""
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
        if innermost == "step_gradients" or (innermost == "forward_layers" and not in_loop):
            return "activations"
        return "a layer at work"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without dims of one entry: a loop over layers may work on groups of one."""
    return tuple(size for size in shape if size > 1)


def accelerator_of(config: RunConfig) -> Accelerator | None:
    """What the topology of `config` says that it runs on, if it has one kind of accelerator."""
    if config.topology is None:
        return None
    kinds = {site.accelerator.name: site.accelerator for site in _sites(config)}
    return next(iter(kinds.values())) if len(kinds) == 1 else None


def _sites(config: RunConfig) -> tuple[Any, ...]:
    assert config.topology is not None, "there is a topology"
    return Topology.load(config.topology).sites


def _mesh_without_devices(config: RunConfig) -> AbstractMesh:
    sizes = config.mesh.model_dump()
    accelerator = accelerator_of(config)
    kind = accelerator.device_kinds[0] if accelerator and accelerator.device_kinds else "cpu"
    platform = "gpu" if kind.startswith("NVIDIA") else "tpu" if kind.startswith("TPU") else "cpu"
    if config.simulate_devices is not None:
        kind = platform = "cpu"
    elif accelerator is None:
        platform = expected_platform()
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return AbstractMesh(
        tuple(sizes[axis] for axis in AXES),
        AXES,
        axis_types=(AxisType.Auto,) * len(AXES),
        abstract_device=device,
    )


def _abstractly(make: Callable[[], Result]) -> Result:
    """`make()`, whose arrays stay abstract: JAX would put even a constant on a device."""
    made: list[Result] = []
    jax.eval_shape(lambda: made.append(make()))
    return made[0]


def _of_one_device(jaxpr: Any) -> tuple[FlatProgram, list[int]]:
    """What each device runs, and where among its inputs the step's arguments are.

    Its other inputs are constants, which JAX hands to a `shard_map` from outside.
    """
    equations = [each for each in jaxpr.eqns if each.primitive.name == "shard_map"]
    assert len(equations) == 1, "a step is one shard_map"
    (equation,) = equations
    assert equation.outvars == jaxpr.outvars, "and nothing else"
    program = flatten(equation.params["jaxpr"])
    return program, [equation.invars.index(variable) for variable in jaxpr.invars]
