"""Everything of a run that is fixed before its first step: mesh, layouts, compiled programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from geojax.accelerators import accelerator_of
from geojax.collectives import FLOAT32, WireFormat, wire_format
from geojax.hlo import Traffic, collective_traffic
from geojax.mesh import make_mesh, platform_of, spans_processes
from geojax.models import model_flops, parameter_count
from geojax.models.attention import chosen_implementation
from geojax.optim import (
    bytes_per_device,
    learning_rate_schedule,
    make_optimizer,
)
from geojax.precision import BackendChoice, chosen_backend
from geojax.quantities import quantity
from geojax.runtime import flags_in_force
from geojax.step.fp8_products import require_fp8_products
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, compile_evaluation, lower_step
from geojax.step.state import TrainState, initial_state, state_layouts
from geojax.topology import Topology
from geojax.train.config import RunConfig
from geojax.train.fp8_settings import policy_of
from geojax.train.pipeline_plan import staged_layers, tick_program
from geojax.train.report import mesh_line


def make_run_mesh(config: RunConfig) -> Mesh:
    """The mesh that `config` asks for, over the devices of all processes.

    Raises:
        UserError: the layout does not fit the devices or the topology.
    """
    topology = Topology.load(config.topology) if config.topology else None
    return make_mesh(topology, **config.mesh.model_dump())


def step_plan(config: RunConfig, mesh: Mesh) -> StepPlan:
    """How the step of `config` runs on `mesh`.

    Raises:
        UserError: its pipeline cannot be, or its FP8 backend cannot run there.
    """
    staged = staged_layers(config)
    ticks = None
    if staged is not None:
        ticks = tick_program(config, staged, platform_of(mesh))
    return StepPlan(
        mesh=mesh,
        policy=policy_of(config.precision, config.fp8),
        accumulation=config.batch.accumulation,
        loss_scale=config.loss_scale,
        chunk_bytes=config.communication.chunk_bytes,
        wire=_wire(config, mesh),
        remat=config.remat,
        products_backend=_fp8_backend(config, mesh).name,
        sites_share_scales=config.fp8.sites_share_scales,
        sequence_parallel=config.parallelism.sequence,
        context_method=config.parallelism.context_method,
        zero_stage=config.zero.stage,
        shard_across_sites=config.zero.across_sites,
        keep_gathered=config.zero.keep_gathered,
        overlap=config.communication.overlap,
        overlap_layers=config.communication.overlap_layers,
        dc_role=config.dc.role if staged else "data",
        staged_layers=staged,
        tick_program=ticks,
    )


def _wire(config: RunConfig, mesh: Mesh) -> WireFormat | None:
    """The format of gradients on the link; of float32 in messages of our own where Gloo carries it,
    whose all-reduce cannot fill a long link (see `geojax.collectives.wire_format`)."""
    asked = wire_format(config.communication.wire)
    over_gloo = platform_of(mesh) == "cpu" and spans_processes(mesh)
    float32 = policy_of(config.precision, config.fp8).reduce_dtype == jnp.float32
    sums = config.dc.role == "data" and not config.zero.across_sites
    return FLOAT32 if asked is None and over_gloo and float32 and sums else asked


def _fp8_backend(config: RunConfig, mesh: Mesh) -> BackendChoice:
    recipe = policy_of(config.precision, config.fp8).recipe
    if recipe is None:
        return BackendChoice("reference", "no FP8")
    return chosen_backend(recipe, platform_of(mesh), config.fp8.backend)


@dataclasses.dataclass(frozen=True)
class Program:
    """A config on a mesh: where everything lies, and what runs."""

    config: RunConfig
    plan: StepPlan
    layouts: TrainState
    optimizer: Any
    step: jax.stages.Compiled
    """`(state, batch, signals, seed) -> (state, metrics)`; compiled once."""
    evaluate: jax.stages.Compiled
    """`(state, batch) -> [sum of losses, number of targets]`."""
    traffic: Traffic
    """The collectives of one step, read from its HLO."""

    @classmethod
    def build(cls, config: RunConfig, plan: StepPlan) -> "Program":
        """Compile the step and the validation pass of `config`.

        Args:
            config: the run.
            plan: from `step_plan`.

        Raises:
            UserError: the compiler made fewer FP8 products than there should be.
        """
        optimizer = make_optimizer(config.optimizer, config.steps)
        schedule = learning_rate_schedule(config.optimizer, config.steps)
        layouts = state_layouts(config.model, optimizer, plan)
        batch = batch_shape(config.batch.rows, config.batch.sequence)
        lowered = lower_step(layouts, config.model, plan, optimizer, schedule, batch)
        step = lowered.compile(compiler_options=plan.compiler_options)
        if plan.products_backend == "xla":
            require_fp8_products(step, config.model, plan)
        return cls(
            config=config,
            plan=plan,
            layouts=layouts,
            optimizer=optimizer,
            step=step,
            evaluate=compile_evaluation(layouts, config.model, plan, batch),
            traffic=collective_traffic(step, plan.mesh),
        )

    def initial_state(self) -> TrainState:
        """The state before the first step."""
        config = self.config
        return initial_state(config.model, self.optimizer, self.layouts, self.plan, config.seed)

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.plan.mesh

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch, padding included."""
        return self.config.batch.rows * self.config.batch.sequence

    @property
    def bytes_across_sites(self) -> float:
        """Bytes that all devices of one site send over the link in one step."""
        devices_of_site = self.mesh.devices.size // self.mesh.shape["dc"]
        return float(self.traffic.bytes_over("dc")) * devices_of_site

    def model_flops_utilisation(self, tokens_per_second: float) -> float | None:
        """Model FLOP/s over the devices' peak in the compute dtype; None where it is not known."""
        accelerator = accelerator_of(self.mesh.devices.flat[0])
        peak = accelerator and accelerator.peak(self.plan.policy.compute_dtype.name)
        if not peak:
            return None
        needed = model_flops(self.config.model, self.config.batch.sequence) * tokens_per_second
        return needed / (peak * self.mesh.devices.size)

    def describe(self) -> str:
        """The line that opens a run."""
        parameters = quantity(parameter_count(self.config.model))
        held = quantity(bytes_per_device(self.layouts), "B")
        return f"{mesh_line(self.mesh)}; {parameters} parameters; {held} of state per device"

    def describe_choices(self) -> str:
        """The line after it: what was chosen for this machine."""
        attention = chosen_implementation(
            self.plan.policy.compute_dtype,
            self.config.model.head_dim,
            packed=True,
            implementation=self.plan.attention,
            platform=self.mesh.devices.flat[0].platform,
        )
        reasons = [attention.reason, flags_in_force()]
        if self.plan.policy.recipe is not None:
            reasons.insert(1, _fp8_backend(self.config, self.mesh).reason)
        return "; ".join(reasons)
