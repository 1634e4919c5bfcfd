"""Gradient buckets by the link: few messages between sites, each worth its round trip.

One communicator runs its operations one after the other (NVIDIA/nccl#574), so a message costs a
round trip and its transfer, whatever else is under way. With B bytes/s of the link for each device
and a round trip of H seconds, a message of 10 B H bytes spends a tenth of its transfer on latency.

    after the backward pass    messages of 10 B H or more: nothing hides them
    under the backward pass    a message of k layers travels while the next k layers compute; of all
                               k that expose least, but for 1% of a step, the largest
    in a pipeline              a message of k chunks of a stage travels while the next k go
                               backwards, and the first k follow the end: the k that exposes least

A bucket before the scatter is its share on the link times the ranks that scatter it: memory is the
upper limit of both.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from geojax.errors import UserError
from geojax.models import AnyModel
from geojax.models.frozen import trained_part
from geojax.planner.cost.networks import RankNetwork
from geojax.planner.traffic.by_axes import ranks_of
from geojax.planner.traffic.gradients import EarlyMessage, GradientMessages, gradient_messages
from geojax.quantities import quantity
from geojax.runtime.platform import GPU, platform_of
from geojax.sharding import SHARD_AXES
from geojax.step.config_plan import DEFAULT_BUCKET_BYTES
from geojax.step.grad_sinks import warmup_iterations
from geojax.step.plan import StepPlan
from geojax.step.state import parameter_layouts
from geojax.topology import Topology

BANDWIDTH_DELAYS = 10
"""Bandwidth-delay products of a device's share of the link in a message, at least."""

MEMORY_SHARE = 0.1
"""The most that gradients on their way may hold of an accelerator's memory, besides the gradients
themselves."""

UNKNOWN_MEMORY_BYTES = 10**10
"""The memory of an accelerator whose memory is not known."""

EXPOSED_LATENCY_LIMIT = 0.02
"""The share of a step's time that exposed latency may take without a warning."""

CHOSEN = ("bucket_bytes", "overlap_grad_reduce", "bucket_layers", "overlap_scatter")
"""The fields of a plan that a link may choose."""

_SLACK = 0.01
"""The share of a step that fewer messages may expose more."""


@dataclasses.dataclass(frozen=True)
class LinkShare:
    """A device's share of the slowest link between sites."""

    name: str
    """The sites that it joins."""
    round_trip_seconds: float
    link_bytes_per_second: float
    """Bandwidth of the link, shared by all devices of a site."""
    devices: int
    """Devices of a site, which send at the same time."""
    sites: int = 2
    card_bytes_per_second: float = math.inf
    """Bandwidth of a device's own network card."""

    @property
    def bytes_per_second(self) -> float:
        """Bandwidth of one device between sites."""
        return min(self.link_bytes_per_second / self.devices, self.card_bytes_per_second)

    @property
    def bandwidth_delay_bytes(self) -> float:
        """The bytes that one device has in flight in a round trip at full rate."""
        return self.bytes_per_second * self.round_trip_seconds

    def seconds(self, message_bytes: float) -> float:
        """Return the time of a sum over sites for which a device sends so many bytes."""
        return (self.sites - 1) * self.round_trip_seconds + message_bytes / self.bytes_per_second

    def __str__(self) -> str:
        return (
            f"{self.name}: {quantity(8 * self.bytes_per_second, 'bit/s')} for each of "
            f"{self.devices} devices x {self.round_trip_seconds * 1e3:.4g} ms = "
            f"{quantity(self.bandwidth_delay_bytes, 'B')}"
        )


@dataclasses.dataclass(frozen=True)
class ComputeTimes:
    """Times of the work that messages may travel beside."""

    compute_seconds: float
    """Forwards and backwards of all microbatches, bubbles included."""
    layer_forward: float
    """Seconds of one layer's forward of one microbatch."""
    layer_backward: float
    held: int = 1
    """Microbatches that a replica with a runtime of its own holds at once."""
    site: RankNetwork | None = None
    """Network of the ranks that share a site's gradients, where their sum may travel beside ticks;
    None: it may not."""


@dataclasses.dataclass(frozen=True)
class Exposure:
    """The messages of a step between sites, and the time of them that no compute hides."""

    messages: GradientMessages
    seconds: float
    latency_seconds: float
    """The part of `seconds` that round trips are to blame for."""
    in_site_seconds: float = 0.0
    """Seconds of sums in the site, of parts that leave early, that ticks hide."""

    @property
    def less_hidden(self) -> float:
        """The seconds, less what ticks hide of the sums in the site."""
        return self.seconds - self.in_site_seconds


@dataclasses.dataclass(frozen=True)
class BucketChoice:
    """A plan with chosen buckets, and what follows from them."""

    plan: StepPlan
    exposure: Exposure


def link_share(topology: Topology, devices: int) -> LinkShare | None:
    """Return the share of each of `devices` of a site; None if a link is not described."""
    shares = []
    for source, target in itertools.permutations(topology.sites, 2):
        try:
            link = topology.link(source.name, target.name)
        except UserError:
            return None
        card = source.between_hosts.bytes_per_second if source.between_hosts else math.inf
        name, trip = f"{source.name}-{target.name}", link.round_trip_seconds
        sites = len(topology.sites)
        shares.append(LinkShare(name, trip, link.bytes_per_second, devices, sites, card))
    return min(shares, key=lambda share: share.bytes_per_second, default=None)


def choose_buckets(
    model: AnyModel,
    plan: StepPlan,
    link: LinkShare,
    times: ComputeTimes | None,
    memory_bytes: int | None,
    auto: Collection[str] = CHOSEN,
) -> BucketChoice:
    """Choose the buckets that expose least, and of those about as good the fewest messages.

    Args:
        model: the model.
        plan: how the step runs, with the buckets that are not to be chosen.
        link: a device's share of the link.
        times: of the step; None where they are not known: nothing is sent under compute then.
        memory_bytes: of an accelerator; None where it is not known.
        auto: the fields of the plan that are to be chosen.
    """
    layouts = trained_part(parameter_layouts(model, plan))
    room = int(MEMORY_SHARE * (memory_bytes or UNKNOWN_MEMORY_BYTES))
    overlaps = [plan.overlap_grad_reduce]
    if "overlap_grad_reduce" in auto:
        hides = times is not None and plan.scans_layers
        overlaps = [False, True] if hides else [False]

    def candidates() -> Iterator[StepPlan]:
        for overlap in overlaps:
            chosen = dataclasses.replace(plan, overlap_grad_reduce=overlap)
            if "bucket_bytes" in auto:
                limit = _bucket_bytes(chosen, link, room)
                chosen = dataclasses.replace(chosen, bucket_bytes=limit)
            counts = [plan.bucket_layers]
            if "bucket_layers" in auto:
                counts = [1]
                if overlap and plan.staged_layers is None:
                    counts = _bucket_layers(layouts, chosen, room)
                elif overlap and times is not None:
                    counts = _layers_of_chunks(model, layouts, chosen, room)
            for count in counts:
                yield dataclasses.replace(chosen, bucket_layers=count)

    choices = []
    for each in candidates():
        messages = gradient_messages(model, layouts, each)
        scatters = [each.overlap_scatter]
        if "overlap_scatter" in auto and times and times.site and platform_of(plan.mesh) is GPU:
            scatters = [False, True] if messages.early else [False]
        for beside in scatters:
            own = dataclasses.replace(each, overlap_scatter=beside)
            choices.append(BucketChoice(own, _exposure(messages, own, link, times)))
    if plan.staged_layers is not None:  # of chunks together the least, even by little
        by_overlap = itertools.groupby(choices, lambda choice: choice.plan.overlap_grad_reduce)
        choices = [min(group, key=_seconds_and_count) for _, group in by_overlap]
    least = min(choice.exposure.less_hidden for choice in choices)
    within = least + (_SLACK * times.compute_seconds if times else 0.0)
    good = [choice for choice in choices if choice.exposure.less_hidden <= within]
    return min(good, key=lambda choice: _seconds_and_count(choice)[::-1])


def _seconds_and_count(choice: BucketChoice) -> tuple[float, int]:
    return choice.exposure.less_hidden, choice.exposure.messages.count


def predict_exposure(
    model: AnyModel, plan: StepPlan, link: LinkShare, times: ComputeTimes | None
) -> Exposure:
    """Predict what the messages of `plan` cost a step beyond its compute."""
    layouts = trained_part(parameter_layouts(model, plan))
    messages = gradient_messages(model, layouts, plan)
    return _exposure(messages, plan, link, times)


def _exposure(
    messages: GradientMessages, plan: StepPlan, link: LinkShare, times: ComputeTimes | None
) -> Exposure:
    exposed = exposed_seconds(messages, plan, link, times)
    at_once = dataclasses.replace(link, round_trip_seconds=0.0)
    latency = exposed - exposed_seconds(messages, plan, at_once, times)
    return Exposure(messages, exposed, latency, _hidden_in_site(messages, plan, link, times))


def _hidden_in_site(
    messages: GradientMessages, plan: StepPlan, link: LinkShare, times: ComputeTimes | None
) -> float:
    """Return the time of sums in the site that a pipeline's ticks hide."""
    if times is None or times.site is None or not messages.early:
        return 0.0
    waits = [
        _waits_of_ticks(messages.early, plan, link, times, site) for site in (times.site, None)
    ]
    sums = sum(times.site.seconds(each.site_bytes) for each in messages.early)
    return sums - (waits[0] - waits[1])


def exposed_seconds(
    messages: GradientMessages, plan: StepPlan, link: LinkShare, times: ComputeTimes | None
) -> float:
    """Return the time of messages that no compute hides.

    An iteration of the backward loop lasts as long as its layers or its messages. The buckets of
    its last iterations are sent when it is over (`geojax.step.grad_sinks`). In a pipeline the same
    holds for a part and the ticks beside which it travels (`geojax.step.early_reduce`).
    """
    after_backward = sum(map(link.seconds, messages.after_backward))
    if plan.staged_layers is not None:
        return after_backward + _waits_of_ticks(messages.early, plan, link, times)
    if not messages.iterations:
        return after_backward
    of_bucket = sum(map(link.seconds, messages.of_bucket))
    window = plan.bucket_layers * times.layer_backward if times else 0.0
    if plan.bucket_layers > 1 and plan.mesh.shape["expert"] > 1:
        # XLA for GPUs starts the message behind a loop over layers that hold all-to-alls: of
        # configs/deepseekmoe-145b-2x256.yaml 0% of the bytes travel beside compute with two layers
        # to a bucket, 96% with one.
        window = 0.0
    late = min(warmup_iterations(plan), messages.iterations)
    beside = messages.iterations - late
    return beside * max(0.0, of_bucket - window) + late * of_bucket + after_backward


def _waits_of_ticks(
    parts: Sequence[EarlyMessage],
    plan: StepPlan,
    link: LinkShare,
    times: ComputeTimes | None,
    site: RankNetwork | None = None,
) -> float:
    """Return how much longer a pipeline's ticks take for parts that travel beside them.

    A part that is whole is summed in its site over `site` (None: in no time) when the one before
    has arrived, and crosses then. With `plan.overlap_scatter` it is summed at once, and crosses
    when the next one is whole and the one before has arrived. Ticks wait for both.
    """
    assert plan.staged_layers is not None, "ticks are of a pipeline"
    tick = plan.staged_layers.max_layers_per_chunk * times.layer_backward if times else 0.0
    now = arrived = 0.0
    for part in parts:
        window, summed = part.ticks * tick, site.seconds(part.site_bytes) if site else 0.0
        if plan.overlap_scatter:
            now = max(now + max(window, summed), arrived)
            arrived = now + link.seconds(part.bytes)
        else:
            now = max(now, arrived) + summed
            arrived = now + link.seconds(part.bytes)
            now += window
    return max(now, arrived) - sum(part.ticks for part in parts) * tick


def _bucket_bytes(plan: StepPlan, link: LinkShare, room: int) -> int:
    """Return a limit whose buckets are `BANDWIDTH_DELAYS` long, in `room` bytes.

    It is twice as much: leaves that are longer are split evenly, in pieces of half of it or more.
    """
    if plan.layout.zero.across_sites:
        ranks = plan.mesh.shape["dc"]
    elif plan.layout.zero.stage >= 2 or (plan.overlap_grad_reduce and plan.staged_layers is None):
        ranks = 1  # scattered before it is sent
    else:
        ranks = ranks_of(SHARD_AXES, plan)
    wire, itemsize = plan.wire_format, plan.policy.reduce_dtype.itemsize
    widening = 1.0 if wire is None else itemsize * 2**20 / wire.message_bytes(2**20)
    wanted = 2 * BANDWIDTH_DELAYS * link.bandwidth_delay_bytes * widening * ranks
    return max(DEFAULT_BUCKET_BYTES, min(math.ceil(wanted), room))


def _bucket_layers(layouts: Any, plan: StepPlan, room: int) -> list[int]:
    """Return the numbers of layers whose gradients fit into `room`, once computed, once sent."""
    layers, held = 0, 0
    for leaf in jax.tree.leaves(layouts["layers"]):
        layers, *shape = leaf.model_shard_shape
        held += 2 * math.prod(shape) * plan.policy.reduce_dtype.itemsize
    dividing = [count for count in range(1, layers + 1) if layers % count == 0]
    return [count for count in dividing if count == 1 or count * held <= room]


def _layers_of_chunks(model: AnyModel, layouts: Any, plan: StepPlan, room: int) -> list[int]:
    """Return the numbers of layers whose chunks may leave a stage together.

    The largest early message, before its scatter in the site, fits into `room`.
    """
    chunks, layers = plan.stages.placement.chunks_per_stage, model.num_stacked_layers
    of_chunk = plan.stages.max_layers_per_chunk
    shapes = [
        leaf.of_layers(of_chunk).model_shard_shape for leaf in jax.tree.leaves(layouts["layers"])
    ]
    held = sum(map(math.prod, shapes)) * plan.policy.reduce_dtype.itemsize
    return [
        together * of_chunk
        for together in range(1, chunks + 1)
        if together == 1
        or (layers % (together * of_chunk) == 0 and min(together, chunks - together) * held <= room)
    ]


def exposure_lines(
    exposure: Exposure,
    plan: StepPlan,
    link: LinkShare,
    times: ComputeTimes | None,
    *,
    auto: Collection[str] = (),
) -> list[str]:
    """Say which buckets a step has and why, what they expose, and what would help.

    Args:
        exposure: from `predict_exposure`.
        plan: how the step runs.
        link: a device's share of the link.
        times: of the step; None where they are not known.
        auto: the settings that were chosen and not given.
    """
    messages = exposure.messages
    settings = {
        "overlap_grad_reduce": str(plan.overlap_grad_reduce).lower(),
        "bucket_layers": str(plan.bucket_layers) if plan.overlap_grad_reduce else "",
        "bucket_bytes": "null" if plan.bucket_bytes is None else quantity(plan.bucket_bytes, "B"),
    }
    shown = ", ".join(
        f"{name} {value}{' (auto)' if name in auto else ''}"
        for name, value in settings.items()
        if value
    )
    delays = messages.longest / link.bandwidth_delay_bytes
    reason = ""
    if auto and plan.overlap_grad_reduce and plan.staged_layers is None and times is not None:
        window = plan.bucket_layers * times.layer_backward
        reason = f", as few as a window of {window * 1e3:.3g} ms for each and the memory allow"
    elif "bucket_bytes" in auto and delays < BANDWIDTH_DELAYS:
        reason = f", not {BANDWIDTH_DELAYS}, for want of memory or of gradients"
    lines = [
        f"gradients over dc: {shown}: {messages.count} messages a device and step, the longest "
        f"{quantity(messages.longest, 'B')}, {delays:.2g} bandwidth-delay products ({link}){reason}"
    ]
    whole, latency = exposure.seconds, exposure.latency_seconds
    if times is None:
        lines.append(
            f"exposed over dc: {whole:.2g} s that no compute hides, {latency:.2g} s of it latency; "
            "the step's time is not known"
        )
        return lines
    step = times.compute_seconds
    part = latency / step
    lines.append(
        f"exposed over dc: {whole:.2g} s that no compute hides ({whole / step:.1%}), "
        f"{latency:.2g} s of it latency ({part:.1%}), of a step of {step:.2g} s "
        "(by the cost model)"
    )
    if part > EXPOSED_LATENCY_LIMIT:
        lines.append(
            f"warning: exposed latency is more than {EXPOSED_LATENCY_LIMIT:.0%} of a step; "
            f"{_what_helps(plan, auto)}"
        )
    return lines


def _what_helps(plan: StepPlan, auto: Collection[str]) -> str:
    """Name what would expose less latency."""
    given = [f"communication.{name}" for name in ("overlap_grad_reduce", "bucket_layers")]
    given = [name for name in given if name.split(".")[1] not in auto]
    if "bucket_bytes" not in auto and not plan.overlap_grad_reduce:
        given.append("communication.bucket_bytes")
    advice = ["a larger batch.global_batch_size (a longer step for as many messages)"]
    if given:
        advice.insert(0, f"leave {' and '.join(given)} to auto")
    elif not plan.overlap_grad_reduce and plan.layout.zero.stage <= 1:
        ranks = ranks_of(SHARD_AXES, plan)
        advice.insert(0, f"fewer data-parallel ranks: a bucket is shared out over {ranks}")
    return " or ".join(advice) + " would help"
