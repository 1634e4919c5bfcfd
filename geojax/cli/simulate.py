"""`geojax simulate CONFIG`: what every pipeline schedule makes of a model on a topology."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import tyro
from rich.console import Console
from rich.table import Table

from geojax.errors import UserError
from geojax.quantities import Seconds
from geojax.settings import Settings, validate

if TYPE_CHECKING:
    from geojax.pipeline.compare import Comparison
    from geojax.pipeline.staged_model import StagedModel
    from geojax.topology import Topology
    from geojax.train.config import RunConfig

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclasses.dataclass(frozen=True)
class SimulateCommand:
    """Compare all pipeline schedules for CONFIG, whose pipeline runs through all of its sites.

    Times follow from the model's operations, the accelerators' peaks and the links of the topology;
    nothing runs. Writes timelines.png and lock-step.png, both as trace.json (for ui.perfetto.dev),
    and bandwidth.png. Any setting of the config can be changed: `--mesh.data 4`.
    """

    config: tyro.conf.Positional[Path]
    """The YAML file of the run; its topology says what the sites are."""

    stages_per_site: int | None = None
    """Pipeline stages in each site; default: mesh.stage."""

    microbatches: int | None = None
    """How many each rank's rows make; default: batch.accumulation, or one a row where that is 1."""

    memory_limit: int | None = None
    """The most microbatches that a stage may hold; default: pipeline.memory_limit, or the number of
    stages, which 1F1B holds."""

    chunks_per_stage: int | None = None
    """Virtual stages of the interleaved schedule; default: pipeline.chunks, at least 2."""

    accelerator: str | None = None
    """Compute as if every site had these (h100-sxm, ascend-910b ...)."""

    efficiency: float = 0.5
    """The share of its peak that an accelerator reaches while it computes."""

    stage_seconds: str | None = None
    """Instead of peak and efficiency: the measured time of a stage for forward and backward of a
    microbatch, such as 180ms."""

    output: Path | None = None
    """Folder of the pictures and the trace; default: simulation in the run directory."""


class _Options(Settings):
    """The numbers of the command, checked."""

    stages_per_site: pydantic.PositiveInt
    microbatches: pydantic.PositiveInt
    memory_limit: pydantic.PositiveInt
    chunks_per_stage: pydantic.PositiveInt
    efficiency: float = pydantic.Field(gt=0, le=1)
    stage_seconds: Seconds | None


def run(command: SimulateCommand, overrides: Sequence[str]) -> int:
    """Print the comparison, write the pictures, and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.pipeline.compare import compare
    from geojax.pipeline.draw import save_timelines
    from geojax.pipeline.trace import write_trace
    from geojax.train.config import RunConfig

    config = RunConfig.load(command.config, overrides)
    topology = _topology(config, command.accelerator)
    options = _options(command, config, len(topology.sites))
    staged = _staged_model(config, topology, options)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    limit, microbatches = options.memory_limit, options.microbatches
    with console.status("simulating the schedules"):
        comparison = compare(staged, microbatches, limit, options.chunks_per_stage)
    console.print(_heading(staged, options))
    console.print(_table(comparison, limit))
    for name, reason in comparison.left_out.items():
        console.print(f"{name} is left out: {reason}")
    console.print(_best(comparison, limit))
    folder = command.output or config.run_directory / "simulation"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: cannot be made ({error.strerror})") from None
    timelines = [entry.event_driven for entry in comparison.entries]
    in_step = [entry.lock_step for entry in comparison.entries if entry.lock_step is not None]
    with console.status("drawing"):
        save_timelines(timelines, staged.site_of, folder / "timelines.png")
        save_timelines(in_step, staged.site_of, folder / "lock-step.png")
        write_trace([*timelines, *in_step], folder / "trace.json")
    written = ["timelines.png", "lock-step.png", "trace.json (open it at ui.perfetto.dev)"]
    if len(topology.sites) > 1:
        with console.status("looking for the bandwidth point"):
            console.print(_bandwidth(staged, limit, folder / "bandwidth.png"))
        written.append("bandwidth.png")
    console.print(f"{folder}: {', '.join(written)}")
    return 0


def _topology(config: "RunConfig", accelerator: str | None) -> "Topology":
    from geojax.accelerators import accelerator_named
    from geojax.mesh import require_sites
    from geojax.topology import Topology

    if config.topology is None:
        raise UserError("topology: is needed to simulate, such as --topology two-h100-sites")
    topology = Topology.load(config.topology)
    require_sites(topology, config.mesh.dc)
    if accelerator is None:
        return topology
    changes = {"accelerator": accelerator_named(accelerator)}
    sites = tuple(site.model_copy(update=changes) for site in topology.sites)
    return topology.model_copy(update={"sites": sites})


def _options(command: SimulateCommand, config: "RunConfig", sites: int) -> _Options:
    """The command's numbers, with what the config says in the place of those left out."""
    given: dict[str, Any] = {
        name: getattr(command, name) for name in _Options.model_fields if hasattr(command, name)
    }
    rows = _rows(config)
    if given["stages_per_site"] is None:
        given["stages_per_site"] = config.mesh.stage
    if given["microbatches"] is None:
        accumulation = config.batch.accumulation
        given["microbatches"] = accumulation if accumulation > 1 else rows
    if given["memory_limit"] is None:
        stages = given["stages_per_site"] * sites
        given["memory_limit"] = config.pipeline.memory_limit or stages
    if given["chunks_per_stage"] is None:
        given["chunks_per_stage"] = max(2, config.pipeline.chunks)
    options = validate(_Options, given, "geojax simulate")
    if rows % options.microbatches:
        fitting = [count for count in range(1, rows + 1) if rows % count == 0]
        raise UserError(
            f"microbatches={options.microbatches} does not divide the {rows} rows of each of the "
            f"{config.mesh.data * config.mesh.expert} data-parallel ranks; "
            f"{', '.join(map(str, fitting))} would"
        )
    return options


def _rows(config: "RunConfig") -> int:
    """Of a batch on each data-parallel rank, where the sites hold the stages of one pipeline."""
    ranks = config.mesh.data * config.mesh.expert
    if config.batch.rows % ranks:
        raise UserError(
            f"batch.rows={config.batch.rows} does not divide over data={config.mesh.data} x "
            f"expert={config.mesh.expert} = {ranks}; {-(-config.batch.rows // ranks) * ranks} would"
        )
    return config.batch.rows // ranks


def _staged_model(config: "RunConfig", topology: "Topology", options: _Options) -> "StagedModel":
    from geojax.pipeline.staged_model import StagedModel
    from geojax.precision import policy

    return StagedModel(
        config.model,
        topology,
        options.stages_per_site,
        rows=_rows(config) // options.microbatches,
        sequence=config.batch.sequence,
        data=config.mesh.data * config.mesh.expert,
        parallelism=config.spread,
        dtype=policy(config.precision).compute_dtype.name,
        remat=config.remat,
        efficiency=options.efficiency,
        stage_seconds=options.stage_seconds,
        given_layers=config.pipeline.layers,
    )


def _heading(staged: "StagedModel", options: _Options) -> str:
    from geojax.models import parameter_count
    from geojax.pipeline.schedule import Placement
    from geojax.train.report import quantity

    placement = Placement.linear(staged.stages)
    costs = staged.costs(placement)
    names = staged.topology.site_names
    sites = f"each of {', '.join(names)}" if len(names) > 1 else names[0]
    layers = " ".join(map(str, staged.layers(placement)))
    lines = [
        f"{quantity(parameter_count(staged.model))} parameters in {staged.stages} stages, "
        f"{staged.stages_per_site} in {sites}; layers of each: {layers}",
        f"devices of a stage: {staged.devices} (data {staged.data}); microbatches: "
        f"{options.microbatches} of {staged.rows} x {staged.sequence} tokens a data-parallel rank",
        f"a stage's forward {_range(costs.forward)}, backward {_range(costs.backward)}, "
        f"gradient of weights {_range(costs.weight)}",
    ]
    for stage, hop in enumerate(costs.hops):
        if hop.link is not None:
            lines.append(
                f"{hop.link} (stages {stage} to {stage + 1}): latency {_time(hop.latency)} + "
                f"{quantity(staged.hop_bytes, 'B')} in {_time(hop.transfer)}"
            )
    return "\n".join(lines)


def _table(comparison: "Comparison", limit: int) -> Table:
    """A row for each schedule; those over the memory limit are dim."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("schedule", no_wrap=True)
    for heading in ("iteration", "lock-step", "bubble", "in sites", "across", "in flight", "link"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for entry in comparison.entries:
        timeline = entry.event_driven
        over = entry.held > limit
        table.add_row(
            entry.name,
            _time(timeline.seconds),
            _time(entry.lock_step.seconds) if entry.lock_step else "-",
            f"{timeline.bubble_ratio:.1%}",
            f"{timeline.bubble_inside_sites:.1%}",
            f"{timeline.bubble_across_sites:.1%}",
            f"{float(entry.held):g}{f' > {limit}' if over else ''}",
            f"{max(timeline.link_use.values(), default=0.0):.1%}",
            style="dim" if over else None,
        )
    return table


def _best(comparison: "Comparison", limit: int) -> str:
    """Which schedule to take within the memory limit, in each mode."""
    lines = []
    for mode in ("stages on their own", "lock-step"):
        best = comparison.best(limit, in_lock_step=mode == "lock-step")
        if best is None:
            lines.append(f"best for {mode}: none holds at most {limit} microbatches")
            continue
        name, seconds = best
        lines.append(
            f"best for {mode} with at most {limit} microbatches in flight: {name}, {_time(seconds)}"
        )
    return "\n".join(lines)


def _bandwidth(staged: "StagedModel", limit: int, image: Path) -> str:
    """Sweep bandwidth and memory limit, draw it, and say what the links need."""
    from geojax.pipeline.bandwidth import sweep_around
    from geojax.pipeline.draw_bandwidth import draw_bandwidth
    from geojax.pipeline.schedule import Placement
    from geojax.train.report import quantity

    costs = staged.costs(Placement.linear(staged.stages))
    links = {hop.link: staged.hop_bytes / hop.transfer for hop in costs.hops if hop.link}
    found = sweep_around(costs, staged.hop_bytes, limit)
    draw_bandwidth(found, links).savefig(image)
    point = next(point for point in found.points if point.memory_limit == limit)
    there = ", ".join(f"{name} has {quantity(rate, 'B/s')}" for name, rate in links.items())
    return (
        f"bandwidth point with {limit} in flight: {quantity(point.simulated, 'B/s')} simulated, "
        f"{quantity(point.closed_form, 'B/s')} by the formula; {there}"
    )


def _range(seconds: Sequence[float]) -> str:
    least, most = _time(min(seconds)), _time(max(seconds))
    return most if least == most else f"{least} to {most}"


def _time(seconds: float) -> str:
    unit, scale = next(
        (unit, scale) for unit, scale in _UNITS.items() if seconds >= scale or unit == "us"
    )
    return f"{seconds / scale:.4g} {unit}"
