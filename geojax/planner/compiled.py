"""What XLA says that a compiled step takes, to compare an estimate with."""

import dataclasses

import jax

from geojax.mesh import make_mesh
from geojax.optim import learning_rate_schedule, make_optimizer
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts
from geojax.train.compiled_run import step_plan
from geojax.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """The bytes that one device holds, as the compiler laid them out (`memory_analysis`)."""

    arguments: int
    """State and batch."""
    results: int
    """Results that do not take an argument's place."""
    temporaries: int
    """Everything else, at the step's peak."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.arguments + self.results + self.temporaries


def compiled_memory(config: RunConfig) -> CompiledMemory:
    """The memory of the step of `config`, compiled for the first devices that this process sees.

    Nothing is allocated. There must be as many devices as the config's mesh has places.
    """
    devices = jax.devices()[: config.mesh.devices]
    plan = step_plan(config, make_mesh(devices=devices, **config.mesh.model_dump()))
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    layouts = state_layouts(config.model, optimizer, plan)
    batch = batch_shape(config.batch.rows, config.batch.sequence)
    step = lower_step(layouts, config.model, plan, optimizer, schedule, batch)
    return memory_of(step.compile(compiler_options=plan.compiler_options))


def memory_of(step: jax.stages.Compiled) -> CompiledMemory:
    """What the compiler says of any compiled program."""
    analysis = step.memory_analysis()
    assert analysis is not None, "the backend analyses memory"
    return CompiledMemory(
        arguments=analysis.argument_size_in_bytes,
        results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
    )
