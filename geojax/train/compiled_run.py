"""A run on one mesh over all sites: its compiled programs, and their trainer."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np

from geojax.config.run_config import RunConfig
from geojax.models import ModelConfig, parameter_count, parameter_kinds
from geojax.models.attention import chosen_implementation
from geojax.models.frozen import unmarked
from geojax.models.lora import merge_adapters
from geojax.optim import learning_rate_schedule, make_optimizer
from geojax.quantities import quantity
from geojax.runtime import flags_in_force
from geojax.runtime.platform import platform_of
from geojax.sharding import bytes_per_device
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.config_plan import fp8_backend_of, step_plan
from geojax.step.plan import StepPlan
from geojax.step.program import batch_shape, trace_evaluation, trace_step
from geojax.step.resolved import Step
from geojax.step.state import TrainState, initial_state, state_layouts, with_own_sites
from geojax.train.links.program_links import ProgramLinks
from geojax.train.runtime import Batch, OtherBatches
from geojax.train.whole_weights import gather_full_params, ungathered_reason


@dataclasses.dataclass(frozen=True)
class CompiledRun:
    """A config on one mesh over all sites: a `geojax.train.runtime.Runtime`."""

    config: RunConfig
    resolved: Step
    """The choices of the run."""
    plan: StepPlan
    layouts: TrainState
    optimizer: Any
    step_program: jax.stages.Compiled
    """`(state, batch, signals, seed) -> (state, metrics)`; compiled once for each batch size."""
    sequences: int
    """Sequences of a batch of the step; a batch of validation is a full one."""
    evaluation_program: jax.stages.Compiled | None = None
    """`(state, batch) -> [sum of losses, number of targets]`; None: nothing is validated."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        resolved: Step,
        plan: StepPlan,
        *,
        validate: bool = False,
        sequences: int | None = None,
    ) -> Self:
        """Compile the step of `config`, and its validation pass if asked to.

        Args:
            config: the run.
            resolved: its choices.
            plan: from `step_plan`.
            validate: compile the validation pass too.
            sequences: those of a batch, a size of `batch.ramp`; None: the full batch.
        """
        optimizer = make_optimizer(config.optimizer, config.steps, parameter_kinds(config.model))
        layouts = state_layouts(config.model, optimizer, plan)
        sequences = sequences or config.batch.global_batch_size
        step = _compiled_step(config, resolved, plan, layouts, optimizer, sequences)
        evaluation = None
        if validate:
            batch = batch_shape(config.batch.global_batch_size, config.batch.sequence_length)
            validation = trace_evaluation(layouts, config.model, plan, batch)
            evaluation = validation.lower().compile(compiler_options=plan.compiler_options)
        return cls(
            config=config,
            resolved=resolved,
            plan=plan,
            layouts=layouts,
            optimizer=optimizer,
            step_program=step,
            sequences=sequences,
            evaluation_program=evaluation,
        )

    @functools.cached_property
    def links(self) -> ProgramLinks:
        """The links between the sites."""
        return ProgramLinks(self.config, self.resolved.of_batch(self.sequences), self.plan.mesh)

    @property
    def parts(self) -> tuple[TrainState, ...]:
        """Nothing: all sites save one state."""
        return ()

    def initial_state(self) -> TrainState:
        """Return the state before the first step, with random weights."""
        config = self.config
        return initial_state(config.model, self.optimizer, self.layouts, self.plan, config.seed)

    def as_saved(self, state: TrainState) -> TrainState:
        """Return the state: a checkpoint has it as it is."""
        return state

    def from_saved(self, saved: TrainState) -> TrainState:
        """Return the state: a checkpoint has it as it is."""
        return saved

    def agree_on_save(self, step: int, saved: TrainState) -> None:
        """Do nothing: one program computes the weights of all sites."""

    def step(
        self,
        state: TrainState,
        batch: Batch,
        requests: Mapping[str, bool],
        others: OtherBatches | None = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Start a step on this process's sequences; the state is donated."""
        signals = global_signals(self.plan, requests)
        seed = np.uint32(self.config.seed)
        on_mesh = self._on_mesh(batch, self.sequences)
        next_state, metrics = self.step_program(state, on_mesh, signals, seed)
        return next_state, metrics

    def replanned(self, step: Step) -> Self | None:
        """Compile another step of the same run and mesh; None: its program is this one's."""
        plan = step_plan(self.config, step, self.plan.mesh)
        if plan.makes_program_of(self.plan):
            return None
        validate = self.evaluation_program is not None
        return self.build(self.config, step, plan, validate=validate, sequences=self.sequences)

    def of_batch(self, sequences: int) -> Self:
        """Compile the step of batches of so many sequences: a size of the ramp, or the full one."""
        step = _compiled_step(
            self.config, self.resolved, self.plan, self.layouts, self.optimizer, sequences
        )
        return dataclasses.replace(self, step_program=step, sequences=sequences)

    def adopt(self, state: TrainState) -> TrainState:
        """Return the state of a run that this one was planned anew from."""
        return with_own_sites(state, self.layouts, self.plan)

    def evaluate(
        self, state: TrainState, batch: Batch, others: OtherBatches | None = None
    ) -> jax.Array:
        """Return [sum of losses, number of targets] of a batch."""
        assert self.evaluation_program is not None, "a run that validates must be built for it"
        full = self.config.batch.global_batch_size
        sums: jax.Array = self.evaluation_program(state, self._on_mesh(batch, full))
        return sums

    def _on_mesh(self, batch: Batch, sequences: int) -> dict[str, jax.Array]:
        """Put this process's share of a batch of so many sequences on the mesh."""
        if sequences not in self._local_sequences:
            self._local_sequences[sequences] = sequences_of_process(self.plan, sequences)
        return global_batch(self.plan, sequences, self._local_sequences[sequences], batch)

    @functools.cached_property
    def _local_sequences(self) -> dict[int, list[int]]:
        """The sequences that this process's devices need, ascending, by the size of the batch."""
        return {}

    def whole_weights(self, state: TrainState) -> Any:
        """Return the weights in the compute dtype, unsharded, on process 0's first device.

        Adapters are merged into the kernels that they lie beside. Every process calls it, and the
        others get None. Where `ungathered_reason` gives no reason, the weights fit there.
        """
        weights = gather_full_params(state.evaluated_weights, self.layouts.weights, self.plan)
        lora = self.config.model.lora
        if weights is None or lora is None:
            return weights
        return merge_adapters(unmarked(weights), lora)

    def ungathered_reason(self) -> str | None:
        """Say why the whole model cannot be gathered on one device; None: it can be."""
        return ungathered_reason(self.config.model, self.layouts, self.plan)

    @property
    def fp8_programs(self) -> list[jax.stages.Compiled]:
        """The program whose products XLA is to make in FP8; none on another backend."""
        return [self.step_program] if self.plan.fp8_backend == "xla" else []

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
        reasons = [flags_in_force()]
        if isinstance(model, ModelConfig):
            attention = chosen_implementation(
                self.plan.policy.compute_dtype,
                model.head_dim,
                packed=True,
                softcap=model.attn_logit_softcapping is not None,
                implementation=self.plan.attention,
                platform=platform_of(mesh).name,
            )
            reasons.insert(0, attention.reason)
        if self.plan.policy.recipe is not None:
            reasons.insert(-1, fp8_backend_of(self.config, mesh).reason)
        sent_bytes = self.links.sent_bytes
        sent = [] if sent_bytes is None else [quantity(sent_bytes, "B")]
        return [
            f"{parameters}; {state_bytes} of state per device",
            "; ".join(reasons),
            *(f"a step of a site: predicted {each} over dc" for each in sent),
            *self.links.lines(),
        ]


def _compiled_step(
    config: RunConfig,
    resolved: Step,
    plan: StepPlan,
    layouts: TrainState,
    optimizer: Any,
    sequences: int,
) -> jax.stages.Compiled:
    """Compile the step of batches of so many sequences; `plan` is that of the full batch."""
    if sequences != config.batch.global_batch_size:
        plan = step_plan(config, resolved.of_batch(sequences), plan.mesh)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    batch = batch_shape(sequences, config.batch.sequence_length)
    traced = trace_step(layouts, config.model, plan, optimizer, schedule, batch)
    return traced.lower().compile(compiler_options=plan.compiler_options)
