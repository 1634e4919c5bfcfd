"""Time of messages between sites whose devices are simulated on a few cores.

In one program Gloo carries one collective at a time and nothing beside it: each message is exposed,
its latency, its bytes and the work of its wire format. Islands send beside the compute, whose core
pays for each byte. Both by what `geojax probe` measured (`geojax.topology.SharedCores`).
"""

import dataclasses
import math
from collections.abc import Iterable

from geojax.collectives import FLOAT32, wire_format
from geojax.pipeline.simulation.costs import Costs
from geojax.planner.cost.layout import Layout
from geojax.planner.cost.prediction import Term
from geojax.topology import SharedCores

SHORT_SUMS = {"data": 1, "stage": 3}
"""Sums of a few bytes over sites in a step of one program, by the role of the sites: losses and
flags; of stages also the norm and what two stages share."""

_SOURCE = "measured sums over sites of simulated devices (geojax.probe.shared_cores)"


@dataclasses.dataclass(frozen=True)
class CoreCosts:
    """Messages of a layout on shared cores."""

    cores: SharedCores
    layout: Layout
    link_bytes_per_second: float = math.inf
    """Bandwidth of the link for each device of a site."""

    def message_seconds(self, sent_bytes: float) -> float:
        """Return the time of one message of each device in one program."""
        rate = min(self.link_bytes_per_second, self.cores.message_bytes_per_second)
        return self.cores.message_seconds + sent_bytes / rate

    def sums_seconds(self, messages: Iterable[float]) -> float:
        """Return the time of the sums of gradients in one program, messages of so many bytes."""
        sent = list(messages)
        return sum(map(self.message_seconds, sent)) + self._encode_seconds(sum(sent))

    def processor_seconds(self, sent_bytes: float) -> float:
        """Return the time in which a site's cores send so many bytes of each device as islands."""
        per_byte = self.cores.processor_seconds_per_byte * self.cores.devices_per_core
        return sent_bytes * per_byte

    def island_sums_seconds(self, sent_bytes: float) -> float:
        """Return what the sums of gradients of each device take of the cores, as islands."""
        return self.processor_seconds(sent_bytes) + self._encode_seconds(sent_bytes)

    def _encode_seconds(self, sent_bytes: float) -> float:
        name = self.layout.gradient_compression
        wire = wire_format(name) or FLOAT32
        per_number = wire.message_bytes(wire.block) / wire.block
        return sent_bytes / per_number * self.cores.encode_seconds_per_number[name]

    def with_hops(self, costs: Costs, hop_bytes: float) -> Costs:
        """Add to the chunks at the ends of a cut what the messages of islands take of their core.

        A chunk's forward and backward each send or receive one message of a hop.
        """
        half = self.processor_seconds(hop_bytes) / 2
        ends = [0.0] * len(costs.forward)
        for index, hop in enumerate(costs.hops):
            if hop.link is not None:
                ends[index] += half
                ends[index + 1] += half
        return dataclasses.replace(
            costs,
            forward=tuple(map(sum, zip(costs.forward, ends, strict=True))),
            backward=tuple(map(sum, zip(costs.backward, ends, strict=True))),
        )

    @property
    def short_sums(self) -> Term:
        """The sums of a few bytes; islands exchange theirs in one message."""
        if self.layout.join == "islands":
            took, count = self.cores.message_seconds / 2, 1
        else:
            count = SHORT_SUMS[self.layout.dc_role]
            took = count * self.cores.message_seconds
        return Term("short sums", took, took, _SOURCE, 0.0, count, "between_sites")
