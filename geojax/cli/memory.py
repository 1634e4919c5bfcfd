"""`geojax memory CONFIG`: what a run holds in the memory of each device, before it runs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from geojax.planner.memory import StepMemory, TracedStep
    from geojax.train.config import RunConfig

_UNITS = {"T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3, "": 1}

MOST_SIMULATED_DEVICES = 64
"""A step for more devices than this is not compiled."""


@dataclasses.dataclass(frozen=True)
class MemoryCommand:
    """Say what the step of CONFIG holds in each device's memory, phase by phase.

    The step is traced without any device. It is also compiled for simulated ones, to compare with
    XLA's own account. Any setting can be changed: `--zero.stage 3`.
    """

    config: tyro.conf.Positional[Path]
    """The YAML file of the run."""

    compile: bool = True
    """Whether to compile the step as well; that of a large model takes a minute or more."""


def run(command: MemoryCommand, overrides: Sequence[str]) -> int:
    """Print the table and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    import jax

    from geojax.planner.memory import TracedStep
    from geojax.runtime import simulate_devices
    from geojax.train.config import RunConfig

    config = RunConfig.load(command.config, overrides)
    jax.config.update("jax_enable_x64", config.precision == "fp64")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    step = TracedStep.of(config)
    other = _with_other_shards(config)
    memory = step.memory()
    console.print(_heading(step))
    console.print(_table(memory))
    console.print(_fit(step, memory))
    simulate_devices(min(config.mesh.devices, MOST_SIMULATED_DEVICES))  # no accelerator is touched
    if other is not None:
        console.print(f"{_across_sites(step)}; {_across_sites(other)}")
    if command.compile:
        with console.status("compiling the step"):
            line = _compared(step)
        console.print(line)
    return 0


def _heading(step: "TracedStep") -> str:
    from geojax.models import parameter_count
    from geojax.quantities import quantity

    used = [f"{axis}={size}" for axis, size in step.plan.mesh.shape.items() if size > 1]
    return (
        f"{quantity(parameter_count(step.config.model))} parameters, "
        f"{' x '.join(used) or 'one device'}, ZeRO {step.plan.zero_stage}, remat "
        f"{step.plan.remat}, {step.plan.policy.name}"
    )


def _table(memory: "StepMemory") -> Table:
    """One device's bytes: a column for each phase of the step, when that phase holds most."""
    from geojax.planner.memory import KINDS, PHASES

    prefix, unit = next(
        (prefix, unit) for prefix, unit in _UNITS.items() if memory.bytes >= unit or unit == 1
    )
    phases = [name for name in PHASES.values() if name in memory.phases]
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column(f"{prefix}B of a device", no_wrap=True)
    for heading in (*phases, "B/param"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for kind in (*KINDS, "total"):
        moments = [memory.phases[phase] for phase in phases]
        held = [each.bytes if kind == "total" else each.by_kind[kind] for each in moments]
        share = held[phases.index(memory.phase)] / memory.parameters
        cells = [f"{each / unit:.2f}" for each in held]
        if any(float(cell) for cell in cells):
            shown = (cell if float(cell) else "" for cell in cells)
            table.add_row(kind, *shown, f"{share:.3g}" if share else "")
    return table


def _fit(step: "TracedStep", memory: "StepMemory") -> str:
    from geojax.planner.memory import accelerator_of
    from geojax.quantities import quantity

    peak = f"peak: {quantity(memory.bytes, 'B')} a device, in phase {memory.phase}"
    accelerator = accelerator_of(step.config)
    if accelerator is None or accelerator.memory_bytes is None:
        return peak
    room = accelerator.memory_bytes
    verdict = "fits into" if memory.bytes <= room else "does not fit into"
    return f"{peak}; {verdict} the {quantity(room, 'B')} of {accelerator.name}"


def _with_other_shards(config: "RunConfig") -> "TracedStep | None":
    """The step with the other choice of `zero.across_sites`, where there is one."""
    from geojax.planner.memory import TracedStep

    if config.mesh.dc == 1 or config.zero.stage == 0 or config.dc.role == "stage":
        return None
    if config.communication.wire != "fp32":
        return None
    zero = config.zero.model_copy(update={"across_sites": not config.zero.across_sites})
    return TracedStep.of(config.model_copy(update={"zero": zero}))


def _across_sites(step: "TracedStep") -> str:
    from geojax.quantities import quantity

    choice = str(step.config.zero.across_sites).lower()
    held, sent = (quantity(each, "B") for each in (step.memory().bytes, step.bytes_across_sites()))
    return f"zero.across_sites {choice}: {held} held, {sent} sent over dc a step"


def _compared(step: "TracedStep") -> str:
    from geojax.planner.compiled import compiled_memory
    from geojax.quantities import quantity

    count = step.config.mesh.devices
    if count > MOST_SIMULATED_DEVICES:
        return f"not compiled: {count} devices are more than the {MOST_SIMULATED_DEVICES} simulated"
    compiled = compiled_memory(step.config)
    estimate = step.memory(on_cpu=True).bytes
    return (
        f"XLA for {count} simulated CPU devices: {quantity(compiled.arguments, 'B')} arguments + "
        f"{quantity(compiled.results, 'B')} results + {quantity(compiled.temporaries, 'B')} "
        f"temporaries = {quantity(compiled.bytes, 'B')}; estimated {quantity(estimate, 'B')}"
        f"{_widened(step)}, ratio {estimate / compiled.bytes:.3f}"
    )


def _widened(step: "TracedStep") -> str:
    return "" if step.on_cpu else " (as XLA for CPUs orders it, and with 32 bits for 16-bit floats)"
