"""Time of messages between sites whose devices are simulated on a few cores.

In one program Gloo carries one collective at a time and nothing beside it: each message is exposed,
its latency, its bytes and the work of its wire format. Islands send beside the compute, whose core
pays for each byte. Memory that programs are given anew takes longer than the work on it, and the
programs of islands are many. All by what `geojax probe` measured (`geojax.topology.SharedCores`).
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator

from geojax.collectives import FLOAT32, wire_format
from geojax.islands.programs.site_part import bucket_count
from geojax.models import ModelConfig
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.simulation.costs import Costs
from geojax.planner.cost.layer_bytes import kept_bytes
from geojax.planner.cost.layout import Layout
from geojax.planner.cost.memory import held_parameters, layout_memory
from geojax.planner.cost.prediction import Term
from geojax.precision import policy
from geojax.topology import SharedCores

SHORT_SUMS = {"data": 1, "stage": 3}
"""Sums of a few bytes over sites in a step of one program, by the role of the sites: losses and
flags; of stages also the norm and what two stages share."""

NEW_MEMORY_SECONDS_PER_BYTE = 1e-6 / 4096
"""Time of a byte of new memory where it was not measured: a microsecond for a page. On a virtual
AMD EPYC a core took 1.15 ns to write a float32 to new memory, and 0.15 ns in place."""

PROGRAM_SECONDS = 3e-4
"""Time in which a program of a hundred arrays starts on a device, where it was not measured: 1.2 ms
for four on one core of the same machine."""

_HOST_SOURCE = "measured by geojax probe, or the stated default (geojax.planner.cost.shared_cores)"
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

    def host_terms(self, model: ModelConfig, sequence_length: int) -> Iterator[Term]:
        """Yield what hosts take for a step beside its operations: new memory, and programs."""
        of_byte, of_program = self.cores.new_memory_seconds_per_byte, self.cores.program_seconds
        if of_byte is None:
            of_byte = self.cores.devices_per_core * NEW_MEMORY_SECONDS_PER_BYTE
        if of_program is None:
            of_program = self.cores.devices_per_core * PROGRAM_SECONDS
        new = self._new_bytes(model, sequence_length)
        yield Term("new memory", new * of_byte, new * of_byte, _HOST_SOURCE, new)
        took = self._programs(model) * of_program
        yield Term("starts of programs", took, took, _HOST_SOURCE)

    def _new_bytes(self, model: ModelConfig, sequence_length: int) -> float:
        """Count the bytes of a device that the system gives out in a step.

        One program has its temporary memory once. Of islands every pass has its own: residuals of
        each microbatch, and of a backward the gradients of its layers; and sums are put together
        to buckets. Gathered weights are in the measured time of their collective.
        """
        layout = self.layout
        memory = layout_memory(model, layout, sequence_length=sequence_length)
        if layout.join == "one_program":
            return memory.gradients + memory.activations + memory.workspace
        held = held_parameters(model, layout, sequence_length)
        of_layer = policy(layout.precision).reduce_dtype.itemsize * held.layer
        of_layer += kept_bytes(model, layout, sequence_length)
        sums = 2 if layout.dc_role == "data" else 1
        return sums * memory.gradients + layout.microbatches * held.layers * of_layer

    def _programs(self, model: ModelConfig) -> int:
        """Count the programs that the host of a stage starts in a step."""
        layout = self.layout
        if layout.join == "one_program":
            return 1
        chunks, passes = layout.virtual_stages, 2
        if layout.dc_role == "data":
            chunks = bucket_count(model.num_stacked_layers, layout.bucket_layers)
        elif schedule_entry(layout.schedule).split_backward:
            passes = 3
        sums, update = 2 * chunks, 3  # reduced and added; of scalars too, and the update
        return passes * chunks * layout.microbatches + sums + update
