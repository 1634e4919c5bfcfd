"""Time of messages between sites whose devices are simulated on a few cores.

In one program Gloo carries one collective at a time, and a device computes nothing beside it. Sums
are exposed with their latency, their bytes and the work of their wire format. A hop is exposed
where no other device of the core can compute meanwhile. Islands send beside the compute, whose core
pays for each byte, and their programs are many. All by what `geojax probe` measured
(`geojax.topology.SharedCores`).
"""

import dataclasses
import math
from collections.abc import Iterable

from geojax.collectives import FLOAT32, wire_format
from geojax.islands.programs.site_part import bucket_count
from geojax.models import AnyModel
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.simulation.costs import Costs
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.prediction import Term
from geojax.topology import SharedCores

SHORT_SUMS = {"data": 1, "stage": 3}
"""Sums of a few bytes over sites in a step of one program, by the role of the sites: losses and
flags; of stages also the norm and what two stages share."""

PROGRAM_SECONDS = 3e-4
"""Time in which a program of a hundred arrays starts on a device, where it was not measured: 1.2 ms
for four on one core of the same machine."""

_HOST_SOURCE = "measured by geojax probe, or the stated default (geojax.planner.cost.shared_cores)"
_SOURCE = "measured sums over sites of simulated devices (geojax.probe.shared_cores)"


@dataclasses.dataclass(frozen=True)
class CoreCosts:
    """Messages of a layout on shared cores."""

    cores: SharedCores
    layout: LayoutCandidate
    link_bytes_per_second: float = math.inf
    """Bandwidth of the link for each device of a site."""

    def message_seconds(self, sent_bytes: float) -> float:
        """Return the time of one message of each device in one program."""
        rate = min(self.link_bytes_per_second, self.cores.message_bytes_per_second)
        return self.cores.message_seconds + sent_bytes / rate

    def exposed_hops_seconds(
        self, messages: float, hop_bytes: float, compute_seconds: float
    ) -> float:
        """Return what hops of one program expose, of an iteration that computes so long.

        Pipelines that share a core take turns: while one waits for its message, the others compute.
        Only the first microbatch's way there and the last one's way back have nothing beside them.
        """
        turns = max(1.0, min(self.cores.devices_per_core, self.layout.mesh.data))
        beside = (1 - 1 / turns) * compute_seconds
        message, alone = self.message_seconds(hop_bytes), 2 * (self.layout.mesh.dc - 1)
        return max(alone * message, messages * message - beside)

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
        name = self.layout.communication.gradient_compression
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
        if self.layout.dc.join == "islands":
            took, count = self.cores.message_seconds / 2, 1
        else:
            count = SHORT_SUMS[self.layout.dc.role]
            took = count * self.cores.message_seconds
        return Term(
            "short sums", _SOURCE, took, took, bytes=0.0, messages=count, network="between_sites"
        )

    def starts_of_programs(self, model: AnyModel) -> Term:
        """Return the time in which a host starts the programs of a step."""
        of_program = self.cores.program_seconds
        if of_program is None:
            of_program = self.cores.devices_per_core * PROGRAM_SECONDS
        took = self._programs(model) * of_program
        return Term("starts of programs", _HOST_SOURCE, took, took)

    def _programs(self, model: AnyModel) -> int:
        """Count the programs that the host of a stage starts in a step."""
        layout = self.layout
        if layout.dc.join == "one_program":
            return 1
        chunks, passes = layout.pipeline.virtual_stages, 2
        if layout.dc.role == "data":
            chunks = bucket_count(model.num_stacked_layers, layout.communication.bucket_layers)
        elif schedule_entry(layout.pipeline.schedule).split_backward:
            passes = 3
        sums, update = 2 * chunks, 3  # reduced and added; of scalars too, and the update
        return passes * chunks * layout.batch.microbatches + sums + update
