"""The sections of `geojax plan CONFIG` on the config's own step: memory, time and messages."""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console, RenderableType
from rich.table import Table

from geojax.cli import plan_tables
from geojax.errors import UserError

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.planner.cost.calibration import Calibration
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.cost.prediction import Prediction
    from geojax.planner.memory import TracedStep
    from geojax.planner.memory_phases import StepMemory
    from geojax.step.plan import StepPlan
    from geojax.step.resolved import SmallerStep

_UNITS = {"T": 10**12, "G": 10**9, "M": 10**6, "k": 10**3, "": 1}
_LOG = "geojax train will log:"


class OwnStep(NamedTuple):
    """The step that a config describes, traced without a device."""

    config: "RunConfig"
    layout: "LayoutCandidate"
    heading: str
    """Mesh, ZeRO stage, rematerialization and precision, of a site if it has its own runtime."""
    memory: "StepMemory"
    memory_notes: tuple[str, ...]
    crossing: tuple[RenderableType, ...]
    """Table and lines of what is sent."""
    sent_bytes: dict[str, float]
    """Bytes that a device sends in a step, by the mesh axes that they cross."""
    ramp: "tuple[SmallerStep, ...]"
    """The steps of smaller batches."""

    @classmethod
    def of(cls, config: "RunConfig") -> "OwnStep":
        """Trace the step of `config`; no device is touched.

        Raises:
            UserError: the layout cannot be.
        """
        return _of_site(config) if config.dc.join == "islands" else _of_program(config)

    def predict(self, calibration: "Calibration") -> "Prediction":
        """Predict the time of the step by the cost model.

        Raises:
            UserError: too little is known.
        """
        from geojax.planner.resolve.run_prediction import predict_run

        config = self.config
        topology = config.load_topology()
        if topology is None:
            raise UserError("there is no topology; add one, such as --topology two-h100-sites")
        if config.mesh.devices != topology.accelerators:
            raise UserError(
                f"the mesh makes {config.mesh.devices} devices, and topology '{topology.name}' has "
                f"{topology.accelerators} accelerators; a mesh of as many would do"
            )
        return predict_run(config, topology, self.layout, calibration)

    @property
    def ramp_line(self) -> str | None:
        """Note on the steps of `batch.ramp`; None without one."""
        if not self.ramp:
            return None
        sizes = self.config.batch.sizes
        *_, full = sizes.phases()
        line = f"batch.ramp: of the full batch, which comes after {sizes.step_of(full.first)} steps"
        first, last = self.ramp[0], self.ramp[-1]
        if first.seconds is None or last.seconds is None:
            return line
        return (
            f"{line}; steps of {first.global_batch_size} to {last.global_batch_size} sequences "
            f"take {first.seconds.value:.3g} to {last.seconds.value:.3g} s"
        )

    def print_fit(self, console: Console) -> None:
        """Say if the step fits, and tabulate the memory of a device."""
        from geojax.planner.memory_phases import estimate_error

        console.print(_verdict(self.config, self.memory))
        console.print(_memory_table(self.memory))
        error = estimate_error(self.config.model)
        console.print(
            f"most is held in phase {self.memory.phase}; of layouts like it the estimate was "
            f"within {error:.0%}"
        )
        for note in self.memory_notes:
            console.print(note)

    def print_crossing(self, console: Console) -> None:
        """Say what the step sends over each mesh axis, and over the link."""
        topology = self.config.load_topology()
        if topology is not None:
            for line in plan_tables.links(topology):
                console.print(line)
        for each in self.crossing:
            console.print(each)

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, strings and numbers."""
        memory = {
            "bytes": self.memory.bytes,
            "phase": self.memory.phase,
            "by_use": dict(self.memory.by_use),
        }
        return {"layout": str(self.layout), "memory": memory, "sent_bytes": self.sent_bytes}


def _of_program(config: "RunConfig") -> OwnStep:
    """Trace the step of one program that spans all sites."""
    from geojax.planner.resolve.link_plan import link_lines
    from geojax.planner.resolve.ramp import order_in_ticks, smaller_steps
    from geojax.planner.resolve.run_layout import planned_layout
    from geojax.planner.resolve.traced_run import trace_run

    step = trace_run(config)
    other = _with_other_sharding(config)
    crossing: list[RenderableType] = [_traffic_table(step)]
    if step.plan.mesh.shape["dc"] > 1:
        crossing.append(_across_sites(config, step))
        if logged := link_lines(config, step.plan):
            crossing += [_LOG, *(f"  {line}" for line in logged)]
    if other is not None:
        crossing.append(f"{_sharding_choice(config, step)}; {_sharding_choice(*other)}")
    return OwnStep(
        config,
        planned_layout(config, step.plan),
        _heading(step.plan),
        step.memory,
        (_on_every_stage(step),) if step.unneeded_bytes else (),
        tuple(crossing),
        {" x ".join(axes): float(sent) for axes, sent in step.traffic.by_axes.items()},
        smaller_steps(config, order_in_ticks(step.plan)),
    )


def _of_site(config: "RunConfig") -> OwnStep:
    """Trace the programs of a site that has a runtime of its own."""
    from geojax.models import parameter_count
    from geojax.planner.resolve.ramp import order_by_events, smaller_steps
    from geojax.planner.resolve.run_layout import layout_of_run
    from geojax.planner.resolve.run_memory import island_memory, offered_bytes
    from geojax.planner.resolve.traced_run import accelerator_of_run
    from geojax.quantities import quantity

    memory, site, held = island_memory(config, accelerator_of_run(config))
    plan, part, microbatches = site.plan, site.part, site.plan.layout.batch.microbatches
    if config.dc.role == "data":
        which, other = "each", "site"
        sent = float(site.message_bytes)
        crossing = (
            f"{quantity(sent, 'B')} a step from a site to each other, in {len(part.chunks)} buckets"
        )
    else:
        layers = f"{part.layers} of {part.model.num_stacked_layers} layers"
        other = "stage"
        which = f"the stage of {config.pipeline_stages} that needs most, with {layers}"
        sent = float(site.hop_bytes * plan.mesh.size)
        crossing = f"{quantity(sent, 'B')} a microbatch from a stage to the next, and as much back"
        sent *= microbatches
        microbatches *= len(part.chunks)
    offered = f"{quantity(offered_bytes(config), 'B')} of a device are offered to each other"
    return OwnStep(
        config,
        layout_of_run(config),
        f"{config.mesh.dc} sites with runtimes of their own, {which}: "
        f"{quantity(parameter_count(part.model))} parameters, {_heading(plan)}",
        memory,
        (f"activations: of {held} of {microbatches} microbatches at once",),
        (
            f"over dc: {crossing}",
            f"transport: at most {offered} {other} (communication), and on GPUs as much of host "
            "memory",
        ),
        {"dc": sent / plan.mesh.size},
        smaller_steps(config, order_by_events(config)),
    )


def _heading(plan: "StepPlan") -> str:
    used = [f"{axis}={size}" for axis, size in plan.mesh.shape.items() if size > 1]
    return (
        f"{' x '.join(used) or 'one device'}, ZeRO {plan.layout.zero.stage}, remat "
        f"{plan.layout.remat}, {plan.policy.name}"
    )


def _memory_table(memory: "StepMemory") -> Table:
    """Tabulate the bytes of one device: a column for the peak of each phase of the step."""
    from geojax.planner.memory_phases import USES

    prefix, unit = _unit(memory.bytes)
    title = f"{prefix}B of a device"
    rows = []
    for use in (*USES, "total"):
        by_phase = {
            phase: held.total() if use == "total" else held[use]
            for phase, held in memory.phases.items()
        }
        cells = {phase: f"{each / unit:.2f}" for phase, each in by_phase.items()}
        if any(map(float, cells.values())):
            shown = {phase: cell if float(cell) else "" for phase, cell in cells.items()}
            rows.append({title: use, **shown})
    return plan_tables.plain_table(rows, left=(title,))


def _traffic_table(step: "TracedStep") -> Table:
    """Tabulate the bytes of the program by the axes that they cross."""
    from geojax.planner.step_traffic import stage_bytes
    from geojax.quantities import quantity

    columns = {"sent by a device": step.traffic.by_axes}
    if step.plan.tick_program is not None:
        of_stages = stage_bytes(step.traffic, step.plan)
        most = max(of_stages, key=lambda sent: sum(sent.values()))
        columns["by the ticks of the busiest stage"] = most
    at_most = {each.axes for each in step.traffic.collectives if each.conditional}
    rows = []
    for axes, sent in step.traffic.by_axes.items():
        cells = {name: quantity(float(of.get(axes, 0)), "B") for name, of in columns.items()}
        if axes in at_most:
            cells["sent by a device"] = f"at most {quantity(float(sent), 'B')}"
        rows.append({"over": " x ".join(axes), **cells})
    return plan_tables.plain_table(rows, left=("over",))


def _unit(largest: int) -> tuple[str, int]:
    return next((prefix, unit) for prefix, unit in _UNITS.items() if largest >= unit or unit == 1)


def _verdict(config: "RunConfig", memory: "StepMemory") -> str:
    """Say if the step fits: into the topology's accelerators, or into which of the catalog's."""
    from geojax.planner.resolve.preflight import judge
    from geojax.planner.resolve.traced_run import accelerator_of_run
    from geojax.quantities import quantity

    accelerator = accelerator_of_run(config)
    if accelerator is not None:
        verdict = judge(config, memory, accelerator, os.environ)
        if verdict.kind != "unknown":
            return f"{verdict.kind}: {verdict.line}"
    needed = quantity(memory.bytes, "B")
    return f"a step needs about {needed} on a device\n{_accelerators_that_hold(memory.bytes)}"


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

    held, stages = step.unneeded_bytes, {"embedding": "first", "head": "last"}
    needing = " and the ".join(stages[use] for use in held)
    return (
        f"of it, {' and '.join(held)}: {quantity(held.total(), 'B')} for weights and gradients on "
        f"every stage, though the {needing} alone need{'s' if len(held) == 1 else ''} "
        f"{'it' if len(held) == 1 else 'them'}"
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
        quantity(float(each), "B") for each in (step.memory.bytes, step.traffic.bytes_over("dc"))
    )
    return f"zero.across_sites {choice}: {held} held, {sent} sent over dc a step"
