"""Predict the time of a training step of a layout, without making its program."""

import dataclasses
import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence

from geojax.models import AnyModel
from geojax.models.flops import model_flops
from geojax.optim import OptimizerSettings
from geojax.planner.buckets import ComputeTimes, link_share
from geojax.planner.cost.adapters import refuse_adapters
from geojax.planner.cost.calibration import RELATIVE_ERROR, Calibration
from geojax.planner.cost.chunks import ChunkWork, SitePieces, chunk_work, site_pieces
from geojax.planner.cost.execution import GEOJAX, Execution
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.memory import held_at_once, layout_memory
from geojax.planner.cost.networks import RankNetwork
from geojax.planner.cost.pipeline import PipelineTime, pipeline_time
from geojax.planner.cost.prediction import LinkUse, Prediction, Term
from geojax.planner.cost.reduction import StepReduction, StepWork
from geojax.planner.cost.shared_cores import CoreCosts
from geojax.precision import policy
from geojax.runtime.device_memory import usable_memory
from geojax.runtime.platform import GPU, platform_of_accelerator
from geojax.sharding import SHARD_AXES
from geojax.topology import Topology

NOT_MODELLED = (
    "host time between kernels, and reading data",
    "multiprocessors and memory bandwidth that collectives take from compute",
    "clocks that fall under load by other than the fitted efficiency",
    "contention of the site's network, stragglers and failures",
    "checkpoints and validation",
)
"""Parts of a step that no term stands for."""

NOT_MODELLED_ON_SHARED_CORES = (
    "stages of one site that take turns on a core",
    "processor time of the messages between islands",
)
"""The same where devices are simulated."""


def predict(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    *,
    calibration: Calibration,
    execution: Execution = GEOJAX,
    optimizer: OptimizerSettings | None = None,
) -> Prediction:
    """Predict a step of `layout.global_batch_size` sequences.

    Args:
        model: the model.
        layout: how the run uses the topology.
        topology: the sites, as many as `layout.mesh.dc`.
        calibration: what accelerators and networks reach of their published rates.
        execution: the habits of the program.
        optimizer: the optimizer; None: AdamW.

    Raises:
        UserError: the layout cannot be, the topology lacks a link, a peak is not known, or the
            model has adapters.
    """
    refuse_adapters(model)
    optimizer = optimizer or OptimizerSettings()
    sites = site_pieces(model, layout, topology, calibration, execution)
    if layout.pipeline_stages > 1:
        layout = layout.changed(pipeline={"head": sites[-1].head})
    steps = []
    for of_site, pieces, iteration, times in _unlike_iterations(
        model, layout, topology, sites, execution, optimizer
    ):
        step_work = StepWork(
            model,
            of_site,
            topology,
            iteration.work,
            pieces.networks,
            times,
            execution,
            optimizer,
        )
        steps.append((iteration, step_work.reduction()))
    slowest, reduced = max(
        steps, key=lambda step: _exposed(step[0].terms) + _exposed(step[1].terms)
    )
    terms = [*slowest.terms, *reduced.terms]
    cores = topology.sites[0].shared_cores
    if cores is not None and layout.mesh.dc > 1:
        of_cores = CoreCosts(cores, layout)
        terms += [of_cores.short_sums, of_cores.starts_of_programs(model)]
    step = _exposed(terms)
    made = layout.changed(communication=reduced.buckets)
    if (chunks := sites[0].tensor_chunks) > 1:
        made = made.changed(parallelism={"chunks": chunks})
    if layout.pipeline_stages > 1:
        made = made.changed(pipeline={"layers": slowest.work.layers})
    return Prediction(
        layout=made,
        step_seconds=step,
        terms=tuple(terms),
        model_flops_utilization=utilization_of(model, layout, topology, step),
        bubble_fraction=slowest.bubble / step,
        links=tuple(_links(layout, topology, slowest, reduced)),
        memory_bytes=_memory_bytes(model, layout, topology, optimizer),
        relative_error=_relative_error(model, layout, topology),
        not_modelled=NOT_MODELLED + (NOT_MODELLED_ON_SHARED_CORES if cores is not None else ()),
    )


@dataclasses.dataclass(frozen=True)
class _Iteration:
    """Forwards and backwards of all microbatches of one pipeline."""

    layout: LayoutCandidate
    sites: Sequence[SitePieces]
    """Work in each site that the pipeline runs through."""
    work: ChunkWork
    terms: tuple[Term, ...]
    seconds: float
    bubble: float
    """Seconds in which the busiest stage has nothing to compute."""
    hops: float = 0.0
    """Messages over a cut between sites, both ways."""


def _exposed(terms: Iterable[Term]) -> float:
    return sum(term.exposed_seconds for term in terms)


def compute_times(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    *,
    calibration: Calibration,
    optimizer: OptimizerSettings | None = None,
) -> ComputeTimes:
    """Predict the work of a step that messages may travel beside, in the slowest site.

    Args and errors are those of `predict`, but that a model may have adapters.
    """
    sites = site_pieces(model, layout, topology, calibration, GEOJAX)
    optimizer = optimizer or OptimizerSettings()
    iterations = _unlike_iterations(model, layout, topology, sites, GEOJAX, optimizer)
    return max((times for *_, times in iterations), key=lambda times: times.compute_seconds)


def _unlike_iterations(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    sites: Sequence[SitePieces],
    execution: Execution,
    optimizer: OptimizerSettings,
) -> Iterator[tuple[LayoutCandidate, SitePieces, _Iteration, ComputeTimes]]:
    """Yield the microbatches of a step in each unlike site, and their times."""
    unlike = {
        (layout.of_site(index), pieces.layer, pieces.last, pieces.hop): pieces
        for index, pieces in enumerate(sites)
    }
    run = functools.partial(_iteration, model)
    through_all = None
    if layout.dc.role == "stage":
        through_all = run(layout, topology, sites, execution)
    held = _held(model, layout, topology, optimizer)
    for (of_site, *_), pieces in unlike.items():
        iteration = through_all or run(of_site, topology, [pieces], execution)
        times = ComputeTimes(
            iteration.seconds,
            sum(piece.forward for piece in pieces.layer),
            sum(piece.backward + piece.weight for piece in pieces.layer)
            + pieces.apart.last_backwards,
            held,
            _network_of_sums(of_site, pieces, topology) if execution.lock_step else None,
        )
        yield of_site, pieces, iteration, times


def _network_of_sums(
    layout: LayoutCandidate, pieces: SitePieces, topology: Topology
) -> RankNetwork | None:
    """Return the network over which a site sums gradients, if that may be beside ticks."""
    on_gpus = platform_of_accelerator(topology.sites[0].accelerator) is GPU
    if not on_gpus or layout.pipeline_stages == 1 or layout.dc.join == "islands":
        return None
    return pieces.networks.group(SHARD_AXES)


def _iteration(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    sites: Sequence[SitePieces],
    execution: Execution,
) -> _Iteration:
    # Of other programs the orders are known, and timed by the same costs.
    work = chunk_work(model, layout, topology, sites, looks_at_memory=execution.lock_step)
    terms = list(_compute_terms(layout, work))
    if layout.splits_backward:
        terms.append(_split_term(layout, work))
    busiest = sum(term.exposed_seconds for term in terms)
    seconds, hops = busiest, 0.0
    if layout.pipeline_stages > 1:
        time = _pipeline_time(layout, topology, sites, work, execution)
        terms += _pipeline_terms(layout, sites, work, time, busiest)
        seconds, hops = time.seconds, time.link_messages
    return _Iteration(layout, sites, work, tuple(terms), seconds, seconds - busiest, hops)


def _pipeline_time(
    layout: LayoutCandidate,
    topology: Topology,
    sites: Sequence[SitePieces],
    work: ChunkWork,
    execution: Execution,
) -> PipelineTime:
    run = functools.partial(
        pipeline_time,
        layout,
        work.placement,
        lock_step=execution.lock_step and layout.dc.join == "one_program",
        late_receives=execution.late_receives,
        chosen_by=work.chosen_by,
    )
    cores, link = topology.sites[0].shared_cores, None
    if cores is not None and layout.dc.role == "stage":
        link = link_share(topology, layout.devices_per_stage)
    if cores is None or link is None:
        return run(work.costs)
    costs = CoreCosts(cores, layout, link.bytes_per_second)
    sent = sites[0].hop_bytes
    if layout.dc.join == "islands":
        return run(costs.with_hops(work.costs, sent))
    made = run(work.costs)
    exposed = costs.exposed_hops_seconds(made.link_messages, sent, made.inside_sites)
    return made._replace(seconds=made.inside_sites + exposed)


def _compute_terms(layout: LayoutCandidate, work: ChunkWork) -> Iterator[Term]:
    """Yield the work of the busiest stage on all of its microbatches."""
    by_name: dict[str, Term] = {}
    for piece in work.busiest:
        before = by_name.get(piece.name)
        all_of = piece.times(layout.batch.microbatches)
        by_name[piece.name] = Term(
            piece.name,
            piece.source,
            all_of.exposed + all_of.hidden + (before.seconds if before else 0.0),
            all_of.exposed + (before.exposed_seconds if before else 0.0),
            bytes=all_of.bytes + (before.bytes if before else 0.0),
            messages=all_of.messages + (before.messages if before else 0.0),
            network=piece.network,
        )
    yield from by_name.values()


def _split_term(layout: LayoutCandidate, work: ChunkWork) -> Term:
    """Return what the halves of the busiest stage's backwards take longer than the whole."""
    halves = sum(piece.backward + piece.weight for piece in work.busiest)
    longer = work.costs.split_surcharge * halves * layout.batch.microbatches
    return Term(
        "split backward",
        "a share of the backward, measured by geojax probe or SPLIT_SURCHARGE "
        "(geojax.planner.cost.chunks)",
        longer,
        longer,
    )


def _pipeline_terms(
    layout: LayoutCandidate,
    sites: Sequence[SitePieces],
    work: ChunkWork,
    time: PipelineTime,
    busiest: float,
) -> Iterator[Term]:
    """Yield the time in which the busiest stage of a pipeline has nothing to compute."""
    yield Term(
        "pipeline bubble",
        "the simulated iteration without the busiest stage's work (geojax.pipeline.simulation)",
        time.inside_sites - busiest,
        time.inside_sites - busiest,
    )
    if layout.dc.role == "stage" and layout.mesh.dc > 1:
        waited = max(time.seconds - time.inside_sites, 0.0)
        longest = max(hop.seconds for hop in work.costs.hops if hop.link is not None)
        yield Term(
            "hops between sites",
            "messages over the longest cut; exposed is the simulated iteration, less the same with "
            "links that take no time (geojax.pipeline.simulation)",
            max(waited, time.link_messages * longest),
            waited,
            bytes=sites[0].hop_bytes * time.link_messages,
            messages=time.link_messages,
            network="between_sites",
        )


def utilization_of(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    step: float,
) -> float | None:
    """Return model FLOPs over the peaks of the accelerators in use, in the compute dtype."""
    dtype = policy(layout.precision).compute_dtype.name
    peaks = [site.accelerator.peak(dtype) for site in topology.sites]
    if not all(peaks):
        return None
    devices = layout.devices_per_site
    peak = sum(count * peak for count, peak in zip(devices, peaks, strict=True) if peak)
    length = layout.batch.sequence_length
    tokens = layout.batch.global_batch_size * length
    return model_flops(model, length) * tokens / (peak * step)


def _memory_bytes(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    optimizer: OptimizerSettings,
) -> float:
    """Return the memory of the fullest device, of the site where it holds most."""
    return max(
        layout_memory(
            model,
            layout.of_site(index),
            device_bytes=site.accelerator.memory_bytes or math.inf,
            optimizer=optimizer,
        ).bytes
        for index, site in enumerate(topology.sites)
    )


def _held(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    optimizer: OptimizerSettings,
) -> int:
    """Return the microbatches that each replica with a runtime of its own holds at once."""
    if layout.dc.join != "islands" or layout.dc.role != "data":
        return 1
    held = []
    for index, site in enumerate(topology.sites):
        usable = usable_memory(site.accelerator, os.environ)
        of_site = layout.of_site(index)
        room = math.inf if usable is None else usable.bytes
        held.append(held_at_once(model, of_site, room, optimizer=optimizer))
    return min(held)


def _relative_error(model: AnyModel, layout: LayoutCandidate, topology: Topology) -> float | None:
    """Return the validated error of the precision on all accelerators; None: of one not known.

    No published step has experts.
    """
    if model.is_moe:
        return None
    quantized = policy(layout.precision).recipe is not None
    precision = "float8" if quantized else policy(layout.precision).compute_dtype.name
    errors = [RELATIVE_ERROR.get((site.accelerator.name, precision)) for site in topology.sites]
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None


def _links(
    layout: LayoutCandidate, topology: Topology, slowest: _Iteration, reduced: StepReduction
) -> Iterator[LinkUse]:
    """Yield each direction of the links that something crosses."""
    if layout.mesh.dc == 1:
        return
    names = topology.site_names
    if layout.dc.role == "stage":
        pairs = [(a, a + 1) for a in range(layout.mesh.dc - 1)]
        pairs += [(b, a) for a, b in pairs]
        messages = slowest.hops / 2
        sent = slowest.sites[0].hop_bytes * messages
        senders = layout.devices_per_stage
    else:
        pairs = [(a, b) for a in range(layout.mesh.dc) for b in range(layout.mesh.dc) if a != b]
        sent = reduced.link_bytes / (layout.mesh.dc - 1)
        messages = reduced.link_messages
        senders = slowest.layout.devices_per_site[0]
    for source, target in pairs:
        link = topology.link(names[source], names[target])
        card = topology.sites[source].between_hosts
        most = senders * card.bytes_per_second if card else math.inf
        yield LinkUse(
            names[source],
            names[target],
            sent * senders,
            messages,
            min(link.bytes_per_second, most),
        )
