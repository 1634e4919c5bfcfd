"""A run's config resolved into a `Step`, once: every choice made, and what is expected of it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax

from geojax.accelerators import accelerator_of
from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.mesh import make_mesh
from geojax.models.flops import model_flops
from geojax.planner.memory import TracedStep
from geojax.planner.resolve.changed_links import planned_for
from geojax.planner.resolve.choices import chunks_of_run, resolved_plan, scans_layers, settled
from geojax.planner.resolve.link_plan import link_lines
from geojax.planner.resolve.pipeline_plan import costs_of_stages
from geojax.planner.resolve.preflight import Preflight, preflight
from geojax.planner.resolve.ramp import Order, order_by_events, order_in_ticks, smaller_steps
from geojax.planner.resolve.run_prediction import step_times
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.planner.resolve.site_schedule import event_schedule, site_work
from geojax.planner.resolve.traced_run import abstract_run_mesh, trace_plan
from geojax.runtime.platform import CPU, platform_of_accelerator
from geojax.step.config_plan import DEFAULT_BUCKET_BYTES
from geojax.step.resolved import Figure, IslandWork, PipelineOrder, Step, with_layers
from geojax.step.step_file import Devices, of_runtimes, origin_of
from geojax.topology import Topology

Log = Callable[[str], None]


def resolve(
    config: RunConfig,
    topology: Topology | None,
    devices: Devices,
    log: Log = lambda line: None,
) -> Step:
    """Make every choice that a run leaves open, and predict what the step takes.

    Nothing is compiled, and no device is touched.

    Args:
        config: the run.
        topology: its sites, with the links as they are; None: it has none.
        devices: those of all sites, site by site; with `dc.join: islands` they are described.
            Memory is compared with theirs.
        log: told of a long search for settings that would fit.

    Raises:
        UserError: the layout cannot be.
    """
    origin = origin_of(config, topology, devices)
    if topology is not None and topology != config.load_topology():
        config = planned_for(config, topology)
    sites = of_runtimes(config, devices)
    if config.dc.join == "islands":
        made = _islands(config, sites)
    else:
        made = _program(config, cast(Sequence[jax.Device], devices))
    compared = _compared(config, sites, log, made.traced)
    return Step(
        layout=made.layout,
        pipeline=made.pipeline,
        sites=made.sites,
        ramp=smaller_steps(config, made.order),
        flops_per_token=model_flops(config.model, config.batch.sequence_length),
        **step_times(config)._asdict(),
        bytes_between_sites=_bytes_between_sites(made.traced),
        memory_bytes=_memory_bytes(compared),
        memory=compared.verdict,
        notes=tuple(made.notes),
        origin=origin,
    )


class _Made(NamedTuple):
    """The choices of a step, and what they were made of."""

    layout: Layout
    pipeline: PipelineOrder | None
    sites: tuple[IslandWork, ...]
    notes: Sequence[str]
    traced: TracedStep | None
    order: Order | None = None
    """The order of the stages' work in the run with another batch; None: there is no pipeline."""


def _program(config: RunConfig, devices: Sequence[jax.Device]) -> _Made:
    """Resolve the step of one program over all sites."""
    if len(devices) == config.mesh.devices:
        mesh = make_mesh(config.load_topology(), devices=devices, **config.mesh.model_dump())
    else:  # of a machine that this one is not: what it would need is worth knowing
        mesh = abstract_run_mesh(config)
    plan = resolved_plan(config, mesh)
    pipeline = None if plan.tick_program is None else PipelineOrder.of(plan.tick_program.ticks)
    traced = trace_plan(config, plan) if config.mesh.dc > 1 or _has_memory(devices) else None
    return _Made(plan.layout, pipeline, (), link_lines(config, plan), traced, order_in_ticks(plan))


def _islands(config: RunConfig, sites: Sequence[Devices]) -> _Made:
    """Resolve the step of sites with runtimes of their own."""
    accelerator = accelerator_of(sites[0][0])
    platform = CPU if accelerator is None else platform_of_accelerator(accelerator)
    layout = config.layout.changed(
        parallelism={"chunks": chunks_of_run(config, platform)},
        pipeline={"head": "last_stage"},
    )
    layout = layout.changed(scan_layers=scans_layers(layout, config.model, platform))
    staged = chosen_layers(config)
    if staged is None:
        by_kind = {
            kind: site_work(config, accelerator_of(own[0])) for kind, own in _by_kind(sites).items()
        }
        works = tuple(by_kind[own[0].device_kind] for own in sites)
        return _Made(_settled(layout, max(works[0].layers)), None, works, [], None)
    notes = []
    try:
        costs_of_stages(config)
    except UserError as unknown:
        notes = [f"pipeline over dc: made without times: {unknown.problem}"]
    layout = _settled(with_layers(layout, staged.layers_per_chunk), 1)
    made = PipelineOrder.of(event_schedule(config))
    return _Made(layout, made, (), notes, None, order_by_events(config))


def _settled(layout: Layout, bucket_layers: int) -> Layout:
    """Return the layout of islands without "auto": their messages are chunks, and hops."""
    chosen = {
        "bucket_bytes": DEFAULT_BUCKET_BYTES,
        "overlap_grad_reduce": False,
        "bucket_layers": bucket_layers,
        "overlap_scatter": False,
        "overlap_param_gather": False,
    }
    given = {name: getattr(layout.communication, name) for name in chosen}
    buckets = {name: chosen[name] if value == "auto" else value for name, value in given.items()}
    ticks = layout.pipeline.hop_ticks
    return settled(layout, buckets, 1 if ticks == "auto" else ticks)


def _by_kind(sites: Sequence[Devices]) -> dict[str, Devices]:
    """Return the devices of the first site of each kind."""
    found: dict[str, Devices] = {}
    for own in sites:
        found.setdefault(own[0].device_kind, own)
    return found


def _compared(
    config: RunConfig, sites: Sequence[Devices], log: Log, traced: TracedStep | None
) -> Preflight:
    """Compare the step's memory with that of every kind of device; what does not fit counts."""
    of_kinds = cast(Sequence[Sequence[jax.Device]], list(_by_kind(sites).values()))
    compared = [preflight(config, own, log, traced) for own in of_kinds]
    lacking = (each for each in compared if each.verdict.kind == "does not fit")
    return next(lacking, compared[0])


def _has_memory(devices: Devices) -> bool:
    accelerator = accelerator_of(devices[0])
    return accelerator is not None and accelerator.memory_bytes is not None


def _bytes_between_sites(traced: TracedStep | None) -> Figure | None:
    if traced is None or traced.plan.mesh.shape["dc"] == 1:
        return None
    of_site = traced.traffic.total_bytes_over("dc") / traced.plan.mesh.shape["dc"]
    return Figure(value=float(of_site), source="the step's collectives, before the compiler")


def _memory_bytes(compared: Preflight) -> Figure | None:
    if compared.memory is None:
        return None
    return Figure(value=compared.memory.bytes, source="a trace of the step")
