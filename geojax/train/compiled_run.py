"""A run on one mesh over all sites: its plan, its compiled programs, and their trainer."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.initial_weights import read_weights, with_weights
from geojax.collectives import FLOAT32, WireFormat, wire_format
from geojax.config.fp8_settings import policy_of
from geojax.config.layout_sections import MeshSettings, ZeroSettings
from geojax.config.pipeline_settings import DcSettings, PipelineSettings
from geojax.config.run_config import RunConfig
from geojax.hlo import HloParseError, Traffic
from geojax.islands.traffic import LinkTraffic
from geojax.mesh import make_mesh, site_names
from geojax.models import parameter_count
from geojax.models.attention import chosen_implementation
from geojax.models.frozen import unmarked
from geojax.models.huggingface import HuggingFaceWeights
from geojax.models.lora import merge_adapters
from geojax.optim import bytes_per_device, learning_rate_schedule, make_optimizer
from geojax.planner.cross_site import CrossSiteBytes, cross_site_bytes
from geojax.planner.step_traffic import step_traffic
from geojax.precision import BackendChoice, chosen_backend
from geojax.quantities import quantity
from geojax.runtime import flags_in_force
from geojax.runtime.liveness.heartbeat import read_heartbeats
from geojax.runtime.platform import platform_of, sums_in_messages
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, require_fp8_products, trace_evaluation, trace_step
from geojax.step.state import (
    TrainState,
    initial_state,
    state_layouts,
    with_own_sites,
    with_saved_sites,
)
from geojax.train.batches import global_batch, global_signals, sequences_of_process
from geojax.train.plan.link_plan import link_lines, with_buckets
from geojax.train.plan.pipeline_plan import staged_layers, tick_program, within_memory
from geojax.train.report import mesh_line
from geojax.train.sample import gather_full_params, unsampled_reason
from geojax.train.trainer import Batch, TrainerFacts
from geojax.transport import MeasuredLink


def make_run_mesh(config: RunConfig) -> Mesh:
    """Make the mesh of `config` over the devices of all processes.

    Raises:
        UserError: the layout does not fit the devices or the topology.
    """
    return make_mesh(config.load_topology(), **config.mesh.model_dump())


def step_plan(config: RunConfig, mesh: Mesh) -> StepPlan:
    """Plan the step of `config` on `mesh`.

    Raises:
        UserError: its pipeline cannot be, or its FP8 backend cannot run there.
    """
    staged = staged_layers(config)
    ticks = None
    if staged is not None:
        ticks = tick_program(config, staged, platform_of(mesh))
    plan = StepPlan(
        mesh=mesh,
        policy=policy_of(config.precision, config.fp8),
        layout=config.layout,
        loss_scale=config.loss_scale,
        wire_format=_wire_format(config, mesh),
        fp8_backend=_choose_fp8_backend(config, mesh).name,
        grouped_matmul=config.model.is_moe,
        share_amax_across_dc=config.fp8.share_amax_across_dc,
        staged_layers=staged,
        tick_program=ticks,
    )
    return with_buckets(config, within_memory(config, plan))


def plan_without_pipeline(config: RunConfig, mesh: Mesh) -> StepPlan:
    """Plan a step of the model on a mesh of one stage, with whole weights on every data rank.

    Raises:
        UserError: its FP8 backend cannot run there.
    """
    changes = {
        "mesh": MeshSettings(**dict(mesh.shape)),
        "dc": DcSettings(),  # sites as stages would be a pipeline too
        "pipeline": PipelineSettings(),
        "zero": ZeroSettings(stage=0),
    }
    return step_plan(config.model_copy(update=changes), mesh)


def _wire_format(config: RunConfig, mesh: Mesh) -> WireFormat | None:
    """Choose the format of gradients on the link.

    Where a psum cannot fill a long link, float32 travels in messages (`sums_in_messages`).
    """
    requested = wire_format(config.communication.gradient_compression)
    float32 = policy_of(config.precision, config.fp8).reduce_dtype == jnp.float32
    sums = config.dc.role == "data" and not config.zero.across_sites
    return (
        FLOAT32 if requested is None and sums_in_messages(mesh) and float32 and sums else requested
    )


def _choose_fp8_backend(config: RunConfig, mesh: Mesh) -> BackendChoice:
    recipe = policy_of(config.precision, config.fp8).recipe
    if recipe is None:
        return BackendChoice("reference", "no FP8")
    return chosen_backend(recipe, platform_of(mesh).name, config.fp8.backend)


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """A config on one mesh over all sites: a `geojax.train.trainer.Trainer`."""

    config: RunConfig
    plan: StepPlan
    layouts: TrainState
    optimizer: Any
    step_program: jax.stages.Compiled
    """`(state, batch, signals, seed) -> (state, metrics)`; compiled once."""
    traffic: Traffic
    """The collectives that the step asks for, before the compiler."""
    evaluation_program: jax.stages.Compiled | None = None
    """`(state, batch) -> [sum of losses, number of targets]`; None: nothing is validated."""
    log: Callable[[str], None] = print
    """Function that shows a line to the user."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        plan: StepPlan,
        log: Callable[[str], None] = print,
        *,
        validate: bool = False,
    ) -> Self:
        """Compile the step of `config`, and its validation pass if asked to.

        Args:
            config: the run.
            plan: from `step_plan`.
            log: shows a line to the user.
            validate: compile the validation pass too.
        """
        optimizer = make_optimizer(config.optimizer, config.steps)
        schedule = learning_rate_schedule(config.optimizer, config.steps)
        layouts = state_layouts(config.model, optimizer, plan)
        batch = batch_shape(config.batch.global_batch_size, config.batch.sequence_length)
        traced = trace_step(layouts, config.model, plan, optimizer, schedule, batch)
        step = traced.lower().compile(compiler_options=plan.compiler_options)
        evaluation = None
        if validate:
            validation = trace_evaluation(layouts, config.model, plan, batch)
            evaluation = validation.lower().compile(compiler_options=plan.compiler_options)
        return cls(
            config=config,
            plan=plan,
            layouts=layouts,
            optimizer=optimizer,
            step_program=step,
            traffic=step_traffic(traced, plan),
            evaluation_program=evaluation,
            log=log,
        )

    def initial_state(self, weights: HuggingFaceWeights | None = None) -> TrainState:
        """Return the state before the first step; `weights` take the place of random ones."""
        config, layouts = self.config, self.layouts
        state = initial_state(config.model, self.optimizer, layouts, self.plan, config.seed)
        if weights is None:
            return state
        if layouts.frozen is not None:
            return self._with_frozen(state, weights)
        return with_weights(state, weights, layouts.parameters, self.plan.mesh)

    def _with_frozen(self, state: TrainState, weights: HuggingFaceWeights) -> TrainState:
        """Return the state with `weights` in the place of frozen ones, which are freed first."""
        for leaf in jax.tree.leaves(state.frozen):
            leaf.delete()
        read = read_weights(weights, self.layouts.frozen, self.plan.mesh)
        return dataclasses.replace(state, frozen=read)

    def step(
        self, state: TrainState, batch: Batch, requests: Mapping[str, bool]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Start a step on this process's sequences; the state is donated."""
        signals = global_signals(self.plan, requests)
        seed = np.uint32(self.config.seed)
        next_state, metrics = self.step_program(state, self._on_mesh(batch), signals, seed)
        return next_state, metrics

    def link_traffic(self) -> Mapping[str, LinkTraffic]:
        """Return nothing: the program moves the messages itself."""
        return {}

    def measured_links(self) -> Mapping[str, MeasuredLink]:
        """Return the least round trip of the heartbeats of each other site, on the first process.

        A process sends every two seconds, and tells the least of its last eight.
        """
        if jax.process_index() != 0:
            return {}
        topology = self.config.load_topology()
        trips = {process: beat.round_trip_seconds for process, beat in read_heartbeats().items()}
        of_sites = {
            site: [
                trips[device.process_index]
                for device in devices.flat
                if math.isfinite(trips.get(device.process_index, math.nan))
            ]
            for site, devices in zip(
                site_names(self.plan.mesh, topology), self.plan.mesh.devices, strict=True
            )
        }
        _, *others = of_sites
        return {site: MeasuredLink(min(of_sites[site], default=None)) for site in others}

    def replanned(self, config: RunConfig) -> Self | None:
        """Compile the step of `config`, of the same layout; None: it is the same step."""
        plan = step_plan(config, self.plan.mesh)
        if plan.makes_program_of(self.plan):
            return None
        validate = self.evaluation_program is not None
        return self.build(config, plan, self.log, validate=validate)

    def adopt(self, state: TrainState) -> TrainState:
        """Return the state of a run that this one was planned anew from."""
        return with_own_sites(state, self.layouts, self.plan)

    def link_lines(self) -> list[str]:
        """Return what the log says of the messages between sites."""
        return link_lines(self.config, self.plan)

    def evaluate(self, state: TrainState, batch: Batch) -> jax.Array:
        """Return [sum of losses, number of targets] of a batch."""
        assert self.evaluation_program is not None, "a run that validates must be built for it"
        sums: jax.Array = self.evaluation_program(state, self._on_mesh(batch))
        return sums

    def _on_mesh(self, batch: Batch) -> dict[str, jax.Array]:
        return global_batch(
            self.plan, self.config.batch.global_batch_size, self.local_sequences, batch
        )

    @functools.cached_property
    def local_sequences(self) -> list[int]:
        """The sequences of a global batch that this process's devices need, ascending."""
        return sequences_of_process(self.plan, self.config.batch.global_batch_size)

    def save(
        self, checkpointer: Checkpointer, step: int, state: TrainState, metadata: Mapping[str, Any]
    ) -> None:
        """Save what the devices hold, but for frozen weights."""
        saved, layouts = (dataclasses.replace(each, frozen=None) for each in (state, self.layouts))
        checkpointer.save(step, saved, layouts, metadata)

    def restore(
        self,
        checkpointer: Checkpointer,
        model: Mapping[str, Any],
        frozen: HuggingFaceWeights | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Restore the newest checkpoint, which any number of sites may have saved.

        The checkpoint holds no `frozen` weights: they are read again.
        """
        layouts = dataclasses.replace(self.layouts, frozen=None)
        saved, metadata = checkpointer.restore(layouts, model=model, adapt=with_saved_sites)
        state = with_own_sites(saved, layouts, self.plan)
        return state if frozen is None else self._with_frozen(state, frozen), metadata

    def gather_full_params(self, state: TrainState) -> Any:
        """Return the weights in the compute dtype, unsharded, on process 0's first device.

        Adapters are merged into the kernels that they lie beside. Every process calls it, and the
        others get None. Where `unsampled_reason` gives no reason, the weights fit there.
        """
        weights = gather_full_params(state.evaluated_weights, self.layouts.weights, self.plan)
        lora = self.config.model.lora
        if weights is None or lora is None:
            return weights
        return merge_adapters(unmarked(weights), lora)

    def unsampled_reason(self) -> str | None:
        """Say why the whole model cannot be gathered on one device; None: it can be."""
        return unsampled_reason(self.config.model, self.layouts, self.plan)

    @functools.cached_property
    def facts(self) -> TrainerFacts:
        """Facts for the log; the first process reads the bytes from the compiled step."""
        sent = self._cross_site_bytes() if self.plan.mesh.shape["dc"] > 1 else None
        return TrainerFacts.of(self.config, self.plan, sent)

    def _cross_site_bytes(self) -> CrossSiteBytes:
        program = self.step_program if jax.process_index() == 0 else None
        sent = cross_site_bytes(self.traffic, self.plan, program)
        if sent.unreadable:
            reason, _, _ = sent.unreadable.partition(";")  # the rest is for who wrote the program
            self.log(f"note: the bytes over dc are predicted, not read: {reason}")
        return sent

    def check_fp8_products(self) -> None:
        """Check on the first process that XLA multiplies in FP8 what the recipe asks for.

        Raises:
            UserError: the compiler made fewer FP8 products than there should be.
        """
        if self.plan.fp8_backend != "xla" or jax.process_index() != 0:
            return
        try:
            require_fp8_products([self.step_program], self.config.model, self.plan)
        except HloParseError as error:
            self.log(f"note: the step's FP8 products were not checked: {error}")

    def describe(self) -> list[str]:
        """Return the lines that open a run: its layout, and the choices made for the machine."""
        model, mesh = self.config.model, self.plan.mesh
        parameters = f"{quantity(parameter_count(model))} parameters"
        if model.lora is not None:
            trained = sum(
                math.prod(leaf.shape) for leaf in jax.tree.leaves(self.layouts.parameters)
            )
            parameters += f", {quantity(trained)} of them trained"
        state_bytes = quantity(bytes_per_device(self.layouts), "B")
        attention = chosen_implementation(
            self.plan.policy.compute_dtype,
            model.head_dim,
            packed=True,
            softcap=model.attn_logit_softcapping is not None,
            implementation=self.plan.attention,
            platform=platform_of(mesh).name,
        )
        reasons = [attention.reason, flags_in_force()]
        if self.plan.policy.recipe is not None:
            reasons.insert(1, _choose_fp8_backend(self.config, mesh).reason)
        sent = self.facts.cross_site
        return [
            f"{mesh_line(mesh)}; {parameters}; {state_bytes} of state per device",
            "; ".join(reasons),
            *([] if sent is None else [f"a step of a site: {sent}"]),
            *self.link_lines(),
        ]
