"""The sum of gradients over sites: its messages, and the time of them that no compute hides.

One program sends buckets as `geojax.planner.buckets` chooses and times them. Islands send a chunk's
sums when its last backward is done, and wait for the others' before the update.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from geojax.errors import UserError
from geojax.islands.programs.site_part import bucket_count
from geojax.models import AnyModel
from geojax.planner.buckets import CHOSEN, ComputeTimes, LinkShare, choose_buckets, link_share
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.prediction import Term
from geojax.planner.cost.shared_cores import CoreCosts
from geojax.planner.traffic.gradients import GradientMessages, gradient_messages
from geojax.step.plan import StepPlan
from geojax.topology import Topology


class LinkSums(NamedTuple):
    """The sums over sites of a step."""

    plan: StepPlan
    """The step with its buckets."""
    link: LinkShare
    messages: GradientMessages
    exposed_seconds: float
    """Time of the messages that no compute hides."""
    hidden_in_site: float = 0.0
    """Time of the sums in the site of early parts that compute hides."""
    buckets: Mapping[str, Any] = MappingProxyType({})
    """Fields of the layout that were open, and what was chosen."""

    @property
    def term(self) -> Term:
        """The sums as a part of the step."""
        took = sum(map(self.link.seconds, self.messages.each))
        return Term(
            "gradients between sites",
            "predicted messages, each a round trip and its bytes over a device's share of the "
            "link, beside the backward as buckets allow (geojax.planner.buckets)",
            max(took, self.exposed_seconds),
            self.exposed_seconds,
            bytes=self.messages.bytes,
            messages=self.messages.count,
            network="between_sites",
        )


def link_sums(
    model: AnyModel,
    layout: LayoutCandidate,
    topology: Topology,
    layouts: Any,
    plan: StepPlan,
    times: ComputeTimes,
) -> LinkSums:
    """Choose buckets where the layout leaves them open, and time the sums over the slowest link.

    Args:
        model: the model.
        layout: its layout.
        topology: the sites.
        layouts: the `LeafLayout` of each parameter.
        plan: the step, its buckets not chosen.
        times: of the work that messages may travel beside.

    Raises:
        UserError: the topology lacks a link.
    """
    link = _slowest(layout, topology)
    shared = topology.sites[0].shared_cores
    cores = CoreCosts(shared, layout, link.bytes_per_second) if shared else None
    if layout.dc.join == "islands":
        messages = gradient_messages(model, layouts, plan)
        exposed = _islands_exposed(model, layout, messages, link, times)
        if cores is not None:
            exposed += cores.island_sums_seconds(messages.bytes)
        return LinkSums(plan, link, messages, exposed)
    memory = [site.accelerator.memory_bytes for site in topology.sites]
    open_fields = [name for name in CHOSEN if getattr(layout.communication, name) == "auto"]
    choice = choose_buckets(
        model,
        plan,
        link,
        times,
        min((int(size) for size in memory if size), default=None),
        open_fields,
    )
    messages, exposed = choice.exposure.messages, choice.exposure.seconds
    if cores is not None:
        exposed = cores.sums_seconds(messages.each)
    buckets = {name: getattr(choice.plan, name) for name in open_fields}
    return LinkSums(choice.plan, link, messages, exposed, choice.exposure.in_site_seconds, buckets)


def _slowest(layout: LayoutCandidate, topology: Topology) -> LinkShare:
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


def _islands_exposed(
    model: AnyModel,
    layout: LayoutCandidate,
    messages: GradientMessages,
    link: LinkShare,
    times: ComputeTimes,
) -> float:
    """Return what islands wait for the others' sums after their last backward.

    A site's backward goes through a chunk with all microbatches that it holds before the next one
    (`geojax.islands.actions`); then the chunk's bucket leaves. Each site sends its sums to each
    other one, and buckets follow each other on the link without waiting for an answer.
    """
    layers = model.num_stacked_layers
    chunks = bucket_count(layers, layout.communication.bucket_layers)
    to_others = messages.bytes * layout.mesh.dc / 2
    transfer = to_others / chunks / link.bytes_per_second
    window = times.held * layers / chunks * times.layer_backward
    sent = 0.0
    for chunk in range(1, chunks + 1):
        sent = max(sent, chunk * window) + transfer
    return sent - chunks * window + link.round_trip_seconds / 2
