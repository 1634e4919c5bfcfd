"""`geojax memory CONFIG`: the memory and the traffic of a run's step, before it runs."""

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from geojax.cli.config_file import ConfigFile

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.models import ModelConfig
    from geojax.planner.memory import StepMemory, TracedStep
    from geojax.step.plan import StepPlan

_UNITS = {"T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3, "": 1}


@dataclasses.dataclass(frozen=True)
class MemoryCommand:
    """Estimate the memory that the step of CONFIG takes on each device, phase by phase.

    geojax traces the step without a device; `geojax compile` compares the estimate with the
    compiled program. The bytes that a device sends over each mesh axis are counted in the same
    trace. Options change settings: `--zero.stage 3`.
    """

    config: ConfigFile
    """YAML file of the run."""


def run(command: MemoryCommand, overrides: Sequence[str]) -> int:
    """Print the tables and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    import jax

    from geojax.config.run_config import RunConfig
    from geojax.planner.resolve.link_plan import link_lines
    from geojax.planner.resolve.traced_run import trace_run

    config = RunConfig.load(command.config, overrides)
    jax.config.update("jax_enable_x64", config.precision == "fp64")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if config.dc.join == "islands":
        _print_site(config, console)
        return 0
    step = trace_run(config)
    other = _with_other_sharding(config)
    memory = step.memory()
    console.print(_heading(step.model, step.plan))
    console.print(_memory_table(memory))
    console.print(_verdict(config, memory))
    if step.embedding_and_head_bytes:
        console.print(_on_every_stage(step))
    console.print(_traffic_table(step))
    if step.plan.mesh.shape["dc"] > 1:
        console.print(_across_sites(config, step), *link_lines(config, step.plan), sep="\n")
    if other is not None:
        console.print(f"{_sharding_choice(config, step)}; {_sharding_choice(*other)}")
    return 0


def _print_site(config: "RunConfig", console: Console) -> None:
    """Print the tables of a site that has a runtime of its own."""
    from geojax.planner.resolve.run_memory import island_memory, offered_bytes
    from geojax.planner.resolve.traced_run import accelerator_of_run
    from geojax.quantities import quantity
    from geojax.train.joined_sites import site_staging

    memory, site, held = island_memory(config, accelerator_of_run(config))
    plan, part, microbatches = site.plan, site.part, site.plan.layout.batch.microbatches
    if config.dc.role == "data":
        which, other = "each", "site"
        sent = quantity(float(site.message_bytes), "B")
        crossing = f"{sent} a step from a site to each other, in {len(part.chunks)} buckets"
    else:
        layers = f"{part.layers} of {part.model.num_stacked_layers} layers"
        other = "stage"
        which = f"the stage of {config.pipeline_stages} that needs most, with {layers}"
        hop = quantity(float(site.hop_bytes * plan.mesh.size), "B")
        crossing = f"{hop} a microbatch from a stage to the next, and as much back"
        microbatches *= len(part.chunks)
    console.print(
        f"{config.mesh.dc} sites with runtimes of their own, {which}: {_heading(part.model, plan)}"
    )
    console.print(_memory_table(memory))
    console.print(_verdict(config, memory))
    offered = f"{quantity(offered_bytes(config), 'B')} of a device are offered to each other"
    staging = quantity(site_staging(config, None, 1).total_bytes, "B")
    console.print(
        f"over dc: {crossing}",
        f"activations: of {held} of {microbatches} microbatches at once",
        f"transport: at most {offered} {other} (communication); {staging} of host memory a site "
        "for staging",
        sep="\n",
    )


def _heading(model: "ModelConfig", plan: "StepPlan") -> str:
    from geojax.models import parameter_count
    from geojax.quantities import quantity

    used = [f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1]
    return (
        f"{quantity(parameter_count(model))} parameters, "
        f"{' x '.join(used) or 'one device'}, ZeRO {plan.layout.zero.stage}, remat "
        f"{plan.layout.remat}, {plan.policy.name}"
    )


def _memory_table(memory: "StepMemory") -> Table:
    """Tabulate the bytes of one device: a column for the peak of each phase of the step."""
    from geojax.planner.memory import KINDS

    prefix, unit = _unit(memory.bytes)
    table = _empty_table(f"{prefix}B of a device", tuple(memory.phases))
    for kind in (*KINDS, "total"):
        by_phase = {
            phase: snapshot.bytes if kind == "total" else snapshot.by_kind[kind]
            for phase, snapshot in memory.phases.items()
        }
        cells = [f"{each / unit:.2f}" for each in by_phase.values()]
        if any(float(cell) for cell in cells):
            table.add_row(kind, *(cell if float(cell) else "" for cell in cells))
    return table


def _traffic_table(step: "TracedStep") -> Table:
    """Tabulate the bytes of the program by the axes that they cross."""
    from geojax.planner.step_traffic import stage_bytes
    from geojax.quantities import quantity

    columns = {"sent by a device in a step": step.traffic.by_axes}
    if step.plan.tick_program is not None:
        of_stages = stage_bytes(step.traffic, step.plan)
        most = max(of_stages, key=lambda sent: sum(sent.values()))
        columns["by the ticks of the busiest stage"] = most
    table = _empty_table("over", tuple(columns))
    at_most = {each.axes for each in step.traffic.collectives if each.conditional}
    for axes in step.traffic.by_axes:
        cells = [quantity(float(sent.get(axes, 0)), "B") for sent in columns.values()]
        cells[0] = f"at most {cells[0]}" if axes in at_most else cells[0]
        table.add_row(" x ".join(axes), *cells)
    return table


def _empty_table(title: str, headings: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column(title, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    return table


def _unit(largest: int) -> tuple[str, int]:
    return next((prefix, unit) for prefix, unit in _UNITS.items() if largest >= unit or unit == 1)


def _verdict(config: "RunConfig", memory: "StepMemory") -> str:
    """Say when most is held, and if it fits: into the topology's accelerators, or into which."""
    from geojax.planner.resolve.preflight import judge
    from geojax.planner.resolve.traced_run import accelerator_of_run
    from geojax.quantities import quantity

    peak = f"peak: {quantity(memory.bytes, 'B')} a device, in phase {memory.phase}"
    accelerator = accelerator_of_run(config)
    if accelerator is not None:
        verdict = judge(config, memory, accelerator, os.environ)
        if verdict.kind != "unknown":
            return f"{peak}\n{verdict.kind}: {verdict.line}"
    return f"{peak}\n{_accelerators_that_hold(memory.bytes)}"


def _accelerators_that_hold(needed: int) -> str:
    """Name the accelerators of the catalog with and without so many usable bytes."""
    from geojax.accelerators import CATALOG
    from geojax.runtime.device_memory import usable_memory

    fits: list[str] = []
    small: list[str] = []
    for accelerator in CATALOG.values():
        usable = usable_memory(accelerator, os.environ)
        if usable is not None:
            (fits if needed <= usable.bytes else small).append(accelerator.name)
    return "; ".join(
        f"{verdict} {', '.join(names)}"
        for verdict, names in (("fits on", fits), ("does not fit on", small))
        if names
    )


def _on_every_stage(step: "TracedStep") -> str:
    """Say what embedding and head take where they are not needed."""
    from geojax.quantities import quantity

    held = quantity(step.embedding_and_head_bytes, "B")
    return (
        f"of it, embedding and head: {held} for weights and gradients on every stage, though the "
        "first and the last alone need them"
    )


def _across_sites(config: "RunConfig", step: "TracedStep") -> str:
    """Say what a site sends in a step, and how long that takes on the link of two sites."""
    from geojax.quantities import quantity

    sites = step.plan.mesh.shape["dc"]
    sent = float(step.traffic.total_bytes_over("dc")) / sites
    line = f"over dc: {quantity(sent, 'B')} a step, site and direction"
    topology = config.load_topology()
    if sites != 2 or topology is None or not topology.links:
        return line
    bandwidth = topology.links[0].bytes_per_second
    return f"{line}; {sent / bandwidth:.2g} s at the {quantity(bandwidth, 'B/s')} of the link"


def _with_other_sharding(config: "RunConfig") -> "tuple[RunConfig, TracedStep] | None":
    """Trace the step with the other choice of `zero.across_sites`, where there is one."""
    from geojax.planner.resolve.traced_run import trace_run

    if config.mesh.dc == 1 or config.zero.stage == 0 or config.dc.role == "stage":
        return None
    if config.communication.gradient_compression != "none":
        return None
    zero = config.zero.model_copy(update={"across_sites": not config.zero.across_sites})
    other = config.model_copy(update={"zero": zero})
    return other, trace_run(other)


def _sharding_choice(config: "RunConfig", step: "TracedStep") -> str:
    from geojax.quantities import quantity

    choice = str(config.zero.across_sites).lower()
    held, sent = (
        quantity(float(each), "B") for each in (step.memory().bytes, step.traffic.bytes_over("dc"))
    )
    return f"zero.across_sites {choice}: {held} held, {sent} sent over dc a step"
