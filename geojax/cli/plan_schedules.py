"""The section of `geojax plan --schedules`: what every pipeline schedule makes of a model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from geojax.cli.simulated_pipeline import SimulatedPipeline, given_hop_ticks, has_pipeline

if TYPE_CHECKING:
    from geojax.pipeline.simulation.compare import ScheduleComparison
    from geojax.planner.staged_pipeline import StagedPipeline

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_LEGEND = (
    "lock-step: one program, whose stages wait for each other in every tick; in flight:\n"
    "microbatches that a stage holds, forward done, backward to come; link: share of time in use"
)


def print_schedules(
    pipeline: SimulatedPipeline, names: Sequence[str], pictures: Path | None, console: Console
) -> list[dict[str, Any]]:
    """Compare schedules, draw them into `pictures` if it is given, and return their figures.

    Args:
        pipeline: the pipeline.
        names: schedules to compare; none: all.
        pictures: folder of the pictures and of the trace; None: nothing is drawn.
        console: where to print.
    """
    from geojax.pipeline.simulation.compare import compare

    config, staged, sizes = pipeline.config, pipeline.staged, pipeline.sizes
    limit = sizes.memory_limit
    with console.status("simulating the schedules"):
        comparison = compare(
            staged.costs,
            staged.layout.stages_per_site,
            sizes.microbatches,
            limit,
            sizes.virtual_stages,
            given_hop_ticks(config),
            names,
        )
    console.print(_assumed(pipeline))
    console.print(_heading(pipeline))
    own = config.pipeline.schedule if has_pipeline(config) else None
    console.print(_table(comparison, limit, own))
    for name, reason in comparison.left_out.items():
        console.print(f"{name} is left out: {reason}")
    console.print(_best(comparison, pipeline))
    console.print(_LEGEND)
    if has_pipeline(config):
        console.print(_as_configured(pipeline))
    for line in _longer_than_a_tick(staged):
        console.print(line)
    if len(staged.topology.sites) > 1:
        with console.status("looking for the bandwidth point"):
            image = None if pictures is None else pictures / "bandwidth.png"
            console.print(_bandwidth(staged, limit, image))
    if pictures is not None:
        with console.status("drawing the schedules"):
            written = _draw(comparison, staged, pictures)
        console.print(f"{pictures}: {', '.join(written)}")
    return [
        {
            "schedule": entry.name,
            "iteration_seconds": entry.event_driven.seconds,
            "lock_step_seconds": entry.lock_step.seconds if entry.lock_step else None,
            "bubble_share": entry.event_driven.bubble_ratio,
            "microbatches_in_flight": float(entry.microbatches_in_flight),
        }
        for entry in comparison.entries
    ]


def _draw(comparison: "ScheduleComparison", staged: "StagedPipeline", folder: Path) -> list[str]:
    from geojax.pipeline.drawing.timelines import save_timelines
    from geojax.pipeline.drawing.trace import write_trace

    timelines = [entry.event_driven for entry in comparison.entries]
    in_step = [entry.lock_step for entry in comparison.entries if entry.lock_step is not None]
    save_timelines(timelines, staged.site_of, folder / "timelines.png")
    save_timelines(in_step, staged.site_of, folder / "lock-step.png")
    write_trace([*timelines, *in_step], folder / "trace.json")
    written = ["timelines.png", "lock-step.png", "trace.json (open it at ui.perfetto.dev)"]
    return [*written, "bandwidth.png"] if len(staged.topology.sites) > 1 else written


def _assumed(pipeline: SimulatedPipeline) -> str:
    """Say where the pipeline runs, and why, and the hop ticks of lock-step."""
    config, topology, staged = pipeline.config, pipeline.topology, pipeline.staged
    names = ", ".join(topology.site_names)
    inside, several = staged.topology.site_names[0], len(topology.sites) > 1
    if not several:
        where = f"one pipeline in {names}"
    elif len(staged.topology.sites) == 1:
        where = f"a pipeline in each of {names} (dc.role data), here that of {inside}"
    elif config.dc.role == "stage":
        where = f"one pipeline through {names} (dc.role stage)"
    else:
        where = f"the config has no pipeline: assumed is one through {names}, a stage in each"
    if len(staged.topology.sites) == 1:
        return where
    ticks = given_hop_ticks(config)
    in_step = "hop ticks that suit each schedule" if ticks is None else f"hop_ticks {ticks}"
    return f"{where}; lock-step has {in_step}"


def _as_configured(pipeline: SimulatedPipeline) -> str:
    """Time the table of ticks that a training run would have."""
    from geojax.pipeline import lock_step
    from geojax.planner.resolve.choices import resolved_plan
    from geojax.planner.resolve.run_stages import chosen_layers
    from geojax.planner.resolve.traced_run import abstract_run_mesh
    from geojax.planner.step_pieces import step_pieces
    from geojax.quantities import quantity
    from geojax.step.program import batch_shape

    config, staged = pipeline.config, pipeline.staged
    microbatches = pipeline.sizes.microbatches
    layers, settings = chosen_layers(config), config.pipeline
    assert layers is not None, "there is a pipeline"
    run = f"geojax train runs {settings.schedule}"
    if layers.placement.stages != staged.stages:
        return f"{run} on {layers.placement.stages} stages, not on the {staged.stages} above"
    if config.batch.microbatches != microbatches:
        return (
            f"{run} with batch.microbatches={config.batch.microbatches} microbatches, not with the "
            f"{microbatches} above"
        )
    plan = resolved_plan(config, abstract_run_mesh(config))
    table = plan.program.ticks
    settled = staged.layout.changed(pipeline={"layers": layers.layers_per_chunk})
    own = dataclasses.replace(staged, layout=settled)
    timeline = lock_step(table, own.costs(layers.placement))
    held = max(timeline.in_flight) / layers.placement.chunks_per_stage
    batch = batch_shape(config.batch.global_batch_size, config.batch.sequence_length)
    layer = step_pieces(config.model, plan, batch).held
    held_bytes = max(table.schedule.most_held(layers.layers_per_chunk, layer))
    hops = f", hop_ticks {max(table.hop_ticks)}" if config.dc.role == "stage" else ""
    return (
        f"{run}{hops}: {_time(timeline.seconds)} in lock-step"
        f"{_throughput(pipeline, timeline.seconds)}, {held:g} "
        f"microbatches in flight, whose layers hold {quantity(held_bytes, 'B')} on a device"
    )


def _throughput(pipeline: SimulatedPipeline, seconds: float) -> str:
    """Say the tokens of all pipelines a second, and the MFU where the peaks are known."""
    from geojax.quantities import quantity

    staged = pipeline.staged
    tokens, utilization = staged.tokens_per_second(seconds), staged.model_flops_utilization(seconds)
    mfu = "" if utilization is None else f", {utilization:.1%} MFU"
    return f", {quantity(pipeline.pipelines * tokens, 'tokens/s')}{mfu}"


def _heading(pipeline: SimulatedPipeline) -> str:
    from geojax.models import parameter_count
    from geojax.pipeline.schedule import Placement
    from geojax.quantities import quantity

    staged, layout = pipeline.staged, pipeline.staged.layout
    placement = Placement.linear(staged.stages)
    costs = staged.costs(placement)
    names = staged.topology.site_names
    sites = f"each of {', '.join(names)}" if len(names) > 1 else names[0]
    layers = " ".join(map(str, staged.layers(placement)))
    lines = [
        f"{quantity(parameter_count(staged.model))} parameters in {staged.stages} stages, "
        f"{staged.layout.mesh.stage} in {sites}; layers of each: {layers}",
        f"devices of a stage: {layout.devices_per_stage} (data {layout.data_ranks}); microbatches: "
        f"{pipeline.sizes.microbatches} of {layout.microbatch_size} x "
        f"{layout.batch.sequence_length} tokens a data-parallel rank",
        f"a stage's forward {_range(costs.forward)}, backward {_range(costs.backward)}, "
        f"gradient of weights {_range(costs.weight)}, from {pipeline.source}",
        "times below: forward and backward passes alone, without gradient messages and update",
    ]
    for stage, hop in enumerate(costs.hops):
        if hop.link is not None:
            lines.append(
                f"{hop.link} (stages {stage} to {stage + 1}): latency {_time(hop.latency)} + "
                f"{quantity(staged.hop_bytes, 'B')} in {_time(hop.transfer)}"
            )
    return "\n".join(lines)


def _table(comparison: "ScheduleComparison", limit: int, own: str | None) -> Table:
    """Make a row for each schedule, the config's marked and those over the limit dim."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("schedule", no_wrap=True)
    for heading in ("iteration", "lock-step", "bubble", "in sites", "across", "in flight", "link"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
    for entry in comparison.entries:
        timeline = entry.event_driven
        over = entry.microbatches_in_flight > limit
        table.add_row(
            f"{entry.name} (config)" if entry.name == own else entry.name,
            _time(timeline.seconds),
            _time(entry.lock_step.seconds) if entry.lock_step else "-",
            f"{timeline.bubble_ratio:.1%}",
            f"{timeline.bubble_inside_sites:.1%}",
            f"{timeline.bubble_across_sites:.1%}",
            f"{float(entry.microbatches_in_flight):g}{f' > {limit}' if over else ''}",
            f"{max(timeline.link_use.values(), default=0.0):.1%}",
            style="dim" if over else None,
        )
    return table


def _best(comparison: "ScheduleComparison", pipeline: SimulatedPipeline) -> str:
    """Name the best schedule within the memory limit, in each mode."""
    limit, lines = pipeline.sizes.memory_limit, []
    for mode in ("stages on their own", "lock-step"):
        best = comparison.best(limit, in_lock_step=mode == "lock-step")
        if best is None:
            lines.append(f"best for {mode}: none holds at most {limit} microbatches")
            continue
        name, seconds = best
        lines.append(
            f"best for {mode} with at most {limit} microbatches in flight: {name}, {_time(seconds)}"
            f"{_throughput(pipeline, seconds)}"
        )
    return "\n".join(lines)


def _longer_than_a_tick(staged: "StagedPipeline") -> list[str]:
    """List the hops that one program cannot hide: it has one message under way over each."""
    from geojax.pipeline.schedule import Placement

    costs = staged.costs(Placement.linear(staged.stages))
    tick = max(costs.work)
    return [
        f"{hop.link}: a hop of {_time(hop.seconds)} is longer than a stage's {_time(tick)} for a "
        "microbatch: geojax train waits for it in every tick, which lock-step does not count"
        for hop in costs.hops
        if hop.link is not None and hop.seconds > tick
    ]


def _bandwidth(staged: "StagedPipeline", limit: int, image: Path | None) -> str:
    """Sweep bandwidth and memory limit, draw it into `image`, and say what the links need."""
    from geojax.pipeline.schedule import Placement
    from geojax.pipeline.simulation.bandwidth import sweep_around
    from geojax.quantities import quantity

    costs = staged.costs(Placement.linear(staged.stages))
    links = {hop.link: staged.hop_bytes / hop.transfer for hop in costs.hops if hop.link}
    found = sweep_around(costs, staged.hop_bytes, limit)
    if image is not None:
        from geojax.pipeline.drawing.bandwidth import draw_bandwidth

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
