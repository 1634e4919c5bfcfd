"""Time of weights and gradients between ranks: gathers, reductions, and the sum over sites.

Bytes and messages are those of `geojax.planner.traffic`, buckets and their exposure on the link
those of `geojax.planner.buckets`.
"""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax

from geojax.collectives import wire_format
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.buckets import (
    CHOSEN,
    DEFAULT_BUCKET_BYTES,
    LinkShare,
    StepTimes,
    choose_buckets,
    link_share,
)
from geojax.planner.cost.calibration import Execution
from geojax.planner.cost.chunks import ChunkWork
from geojax.planner.cost.layout import Layout
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.cost.pipeline import small_program
from geojax.planner.cost.prediction import Term
from geojax.planner.traffic.by_axes import BytesByAxes, add, no_bytes
from geojax.planner.traffic.gradients import (
    GradientMessages,
    gradient_messages,
    predicted_gradient_bytes,
)
from geojax.planner.traffic.weights import predicted_weight_bytes
from geojax.precision import policy
from geojax.step.plan import StepPlan
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import parameter_layouts
from geojax.topology import Topology

ISLAND_CHUNKS = 4
"""Buckets of islands in role data where a run leaves their number open."""


@dataclasses.dataclass(frozen=True)
class ComputeTimes:
    """Times of the work that messages may travel beside."""

    compute_seconds: float
    """Forwards and backwards of all microbatches, bubbles included."""
    layer_forward: float
    """Seconds of one layer's forward of one microbatch."""
    layer_backward: float


def step_plan(layout: Layout, work: ChunkWork) -> StepPlan:
    """Return the layout as the plan of a step on a mesh without devices.

    Buckets that are left open are as long as a leaf: `_over_link` chooses those that cross a link.
    """
    staged = ticks = None
    if layout.pipeline_stages > 1:
        staged = StagedLayers(work.placement, work.layers)
    if staged is not None and layout.dc > 1 and layout.dc_role == "data":
        ticks = small_program(layout, work.placement, work.costs)
    crosses = layout.dc > 1 and layout.dc_role == "data"
    given = layout.bucket_bytes
    return StepPlan(
        mesh=abstract_mesh(layout.mesh_sizes, platform="gpu"),
        policy=policy(layout.precision),
        microbatches=layout.microbatches,
        bucket_bytes=None if given == "auto" else given,
        wire_format=wire_format(layout.gradient_compression) if crosses else None,
        remat=layout.remat,
        sequence_parallel=layout.sequence_parallel,
        context_method=layout.context_method,
        zero_stage=layout.zero_stage,
        shard_across_sites=layout.shard_across_sites,
        reshard_after_forward=layout.reshard_after_forward,
        overlap_grad_reduce=layout.overlap_grad_reduce is True,
        bucket_layers=1 if layout.bucket_layers == "auto" else layout.bucket_layers,
        dc_role=layout.dc_role if staged else "data",
        staged_layers=staged,
        tick_program=ticks,
    )


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Weights and gradients of a step on their way between ranks, and the update."""

    terms: tuple[Term, ...]
    link_bytes: float = 0.0
    """Bytes that a device sends to the other sites."""
    link_messages: float = 0.0


def reduction(
    model: ModelConfig,
    layout: Layout,
    topology: Topology,
    work: ChunkWork,
    networks: SiteNetworks,
    times: ComputeTimes,
    execution: Execution,
) -> Reduction:
    """Time what follows and precedes the microbatches of a step.

    Raises:
        UserError: the topology lacks a link.
    """
    plan = step_plan(layout, work)
    layouts = parameter_layouts(model, plan)
    crosses = layout.dc > 1 and layout.dc_role == "data"
    link = _link(layout, topology) if crosses else None
    messages = None
    exposed = 0.0
    if link is not None:
        plan, messages, exposed = _over_link(model, layout, topology, layouts, plan, link, times)
    weights = predicted_weight_bytes(model, layouts, plan)
    narrower = Fraction(1)
    if execution.reduced_itemsize is not None:
        narrower = Fraction(execution.reduced_itemsize, plan.policy.reduce_dtype.itemsize)
    gradients = no_bytes()
    add(gradients, predicted_gradient_bytes(model, layouts, plan), narrower)
    terms = [
        *_in_site(model, plan, networks, weights, gradients, times, execution, work),
        _update(layouts, networks),
    ]
    if link is None or messages is None:
        return Reduction(tuple(terms))
    gathered = float(sum(sent for axes, sent in weights.items() if "dc" in axes))
    if gathered:
        took = link.seconds(gathered)
        terms.append(
            Term(
                "weights between sites",
                took,
                took,
                "predicted bytes over a device's share of the link "
                "(geojax.planner.traffic.weights)",
                gathered,
                1,
                "between_sites",
            )
        )
    took = sum(map(link.seconds, _each(messages)))
    terms.append(
        Term(
            "gradients between sites",
            max(took, exposed),
            exposed,
            "predicted messages, each a round trip and its bytes over a device's share of the "
            "link, beside the backward as buckets allow (geojax.planner.buckets)",
            messages.bytes,
            messages.count,
            "between_sites",
        )
    )
    return Reduction(tuple(terms), messages.bytes + gathered, messages.count)


def _link(layout: Layout, topology: Topology) -> LinkShare:
    """Return a device's share of the slowest link.

    Raises:
        UserError: the topology lacks a link.
    """
    share = link_share(topology, layout.devices_per_site[0])
    if share is None:
        raise UserError(
            f"topology '{topology.name}' does not describe the links between all of its sites; add "
            "their round_trip_seconds and bytes_per_second under links"
        )
    return share


def _each(messages: GradientMessages) -> list[float]:
    early = [each.bytes for each in messages.early]
    return [*messages.of_bucket * messages.iterations, *early, *messages.after_backward]


def _over_link(
    model: ModelConfig,
    layout: Layout,
    topology: Topology,
    layouts: Any,
    plan: StepPlan,
    link: LinkShare,
    times: ComputeTimes,
) -> tuple[StepPlan, GradientMessages, float]:
    """Choose buckets where the layout leaves them open; return them and what they expose."""
    if layout.join == "islands":
        messages = gradient_messages(model, layouts, dataclasses.replace(plan, bucket_bytes=None))
        return plan, messages, _islands_exposed(model, layout, messages, link, times)
    memory = [site.accelerator.memory_bytes for site in topology.sites]
    choice = choose_buckets(
        model,
        plan,
        link,
        StepTimes(times.compute_seconds, times.layer_backward),
        min((int(size) for size in memory if size), default=None),
        [name for name in CHOSEN if getattr(layout, name) == "auto"],
    )
    return choice.plan, choice.exposure.messages, choice.exposure.seconds


def _islands_exposed(
    model: ModelConfig,
    layout: Layout,
    messages: GradientMessages,
    link: LinkShare,
    times: ComputeTimes,
) -> float:
    """Return what islands wait for the others' sums after their last backward.

    A site's backward goes through a chunk with all microbatches that it holds before the next one
    (`geojax.islands.actions`); then the chunk's bucket leaves. Each site sends its sums to each
    other one, and buckets follow each other on the link without waiting for an answer.
    """
    held = min(layout.memory_limit or layout.microbatches, layout.microbatches)
    layers = model.num_hidden_layers
    together = math.ceil(layers / ISLAND_CHUNKS)
    if layout.bucket_layers != "auto":
        together = layout.bucket_layers
    chunks = math.ceil(layers / together)
    to_others = messages.bytes * layout.dc / 2
    transfer = to_others / chunks / link.bytes_per_second
    window = held * together * times.layer_backward
    sent = 0.0
    for chunk in range(1, chunks + 1):
        sent = max(sent, chunk * window) + transfer
    return sent - chunks * window + link.round_trip_seconds / 2


def _in_site(
    model: ModelConfig,
    plan: StepPlan,
    networks: SiteNetworks,
    weights: BytesByAxes,
    gradients: BytesByAxes,
    times: ComputeTimes,
    execution: Execution,
    work: ChunkWork,
) -> Iterator[Term]:
    """Yield the gathers of weights and the reductions of gradients inside a site.

    ZeRO 3 gathers a layer's weights while the layer before computes, forwards and backwards, and
    scatters gradients in the same way. Otherwise both happen once a step: one after the other with
    the compute, or, where the program overlaps them, chunk by chunk beside the first forwards and
    the last backwards, so that one chunk's is exposed, and what is longer than its window.
    """
    beside_backward = plan.overlap_grad_reduce and plan.staged_layers is None
    overlaps = {
        "weights in the site": execution.overlaps_gather,
        "gradients in the site": execution.overlaps_reduction or beside_backward,
    }
    for name, sent, source in (
        ("weights in the site", weights, "geojax.planner.traffic.weights"),
        ("gradients in the site", gradients, "geojax.planner.traffic.gradients"),
    ):
        took, total, count = 0.0, 0.0, 0.0
        network = None
        for axes, each in sent.items():
            if "dc" in axes or not axes or not each:
                continue
            group = networks.group(axes)
            messages = max(1.0, float(each) / DEFAULT_BUCKET_BYTES / group.ranks)
            took += group.seconds(float(each), messages)
            total += float(each)
            count += messages * group.steps
            if network != "between_hosts":
                network = group.network
        if not total:
            continue
        gathers = name.startswith("weights")
        if plan.zero_stage == 3:
            exposed = _beside_layers(model, plan, times, took, gathers=gathers)
        elif overlaps[name]:
            exposed = _beside_chunks(model, work, times, took, gathers=gathers)
        else:
            exposed = took
        yield Term(
            name,
            took,
            exposed,
            f"predicted bytes over the network's bandwidth, and the steps of its rings ({source})",
            total,
            count,
            network,
        )


def _beside_layers(
    model: ModelConfig, plan: StepPlan, times: ComputeTimes, took: float, *, gathers: bool
) -> float:
    """Return the time of a collective a layer that the layer beside it does not hide.

    A layer's backward hides its gather first, then the scatter of the layer behind it.
    """
    passes = plan.microbatches * model.num_hidden_layers
    both = gathers and plan.reshard_after_forward
    one = took / (passes * (2 if both else 1))
    if gathers:
        hidden = min(one, times.layer_forward) + (min(one, times.layer_backward) if both else 0.0)
        return (1 + both) * passes * one - (passes - 1) * hidden
    room = times.layer_backward - times.layer_forward
    return passes * one - (passes - 1) * min(one, max(0.0, room))


def _beside_chunks(
    model: ModelConfig,
    work: ChunkWork,
    times: ComputeTimes,
    took: float,
    *,
    gathers: bool,
) -> float:
    """Return the time of a collective a chunk that other chunks' microbatches do not hide."""
    stages = work.placement.stages
    if stages > 1:
        parts = len(work.placement.chunks_of(0))
        layers = max(work.layers) * stages
    else:
        parts, layers = model.num_hidden_layers, 1
    window = layers * (times.layer_forward if gathers else times.layer_backward)
    one = took / parts
    return one + (parts - 1) * max(0.0, one - window)


def _update(layouts: Any, networks: SiteNetworks) -> Term:
    """Time the optimizer on a device's shard of the state.

    Adam reads gradient, weight and two moments and writes the latter three in 32 bits, and the
    weight in 16; the norm of the gradient reads it once more: 34 bytes a number.
    """
    numbers = sum(math.prod(leaf.shard_shape) for leaf in jax.tree.leaves(layouts))
    rate = networks.site.accelerator.memory_bytes_per_second or math.inf
    took = 34 * numbers / (rate * networks.calibration.memory)
    return Term(
        "optimizer",
        took,
        took,
        "34 bytes a number of the state's shard over the memory's bandwidth (Adam)",
        34 * numbers,
    )
