"""A step compiled ahead of time: memory, messages, and what overlaps with what.

All figures are read from the compiled program: the compiler's account of memory, the HLO's
collectives, and for GPUs the streams on which the runtime launches them.
"""

import collections
import dataclasses
import resource
import tempfile
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from geojax.hlo import Collective, Traffic, collective_traffic
from geojax.hlo.overlap import Flight, flights
from geojax.hlo.products import ProductFlops, product_flops
from geojax.hlo.thunks import Launch, read_launches
from geojax.planner.memory import CompiledMemory, StepMemory, TracedStep
from geojax.runtime.compilation import without_compilation_cache
from geojax.runtime.platform import Platform
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.step.plan import StepPlan

LEAST_PAYLOAD_BYTES = 2**16
"""Bytes that a device sends in a bucket or hop at least; norms, losses and flags are shorter."""


@dataclasses.dataclass(frozen=True)
class Messages:
    """The collectives of one kind over the same axes, in one run of the step."""

    axes: tuple[str, ...]
    kind: str
    count: int
    """Number of messages of a device."""
    payloads: int
    """Number of those that carry a bucket or hop: `LEAST_PAYLOAD_BYTES` or more."""
    bytes_sent: Fraction
    """Bytes that a device sends."""
    at_least: bool
    """True if a loop around one of them runs as often as data of the run say, and counts once."""
    bytes_beside_compute: Fraction
    """Bytes in messages that travel while matrix products run."""
    streams: tuple[str, ...]
    """Communication streams on which they are launched; "compute" where the compute waits."""
    together: tuple[str, ...]
    """Axes of the collectives that are in flight with them on other streams."""

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, strings and numbers."""
        numbers = {
            "bytes_sent": float(self.bytes_sent),
            "bytes_beside_compute": float(self.bytes_beside_compute),
        }
        return dataclasses.asdict(self) | {"axes": ",".join(self.axes)} | numbers


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step, and what compiling it took on this machine."""

    plan: StepPlan
    platform: Platform
    memory: CompiledMemory
    estimate: StepMemory
    messages: tuple[Messages, ...]
    """In the order of the mesh's axes."""
    products: ProductFlops
    """FLOPs of the products with weights of a device."""
    seconds: float
    """Time to lower and to compile."""
    peak_memory_bytes: int
    """Largest resident memory of this process so far."""

    @classmethod
    def of(cls, step: TracedStep) -> "CompiledStep":
        """Compile `step` for the devices of its mesh, and read the program."""
        gpu = step.platform.name == "gpu"
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="geojax-") as folder, without_compilation_cache():
            options: dict[str, str | bool | int] = {}
            if gpu:
                options |= gpu_compiler_options() | {"xla_dump_to": folder}
            options |= step.plan.compiler_options or {}
            program = step.program.lower().compile(compiler_options=options)
            seconds = time.monotonic() - began
            launches = read_launches(Path(folder)) if gpu else ()
        mesh, staged = step.plan.mesh, step.plan.staged_layers
        longest = staged.max_layers_per_chunk if staged else None
        traffic = collective_traffic(program, mesh, longest_loop=longest)
        found = flights(program, mesh, longest_loop=longest) if gpu else ()
        return cls(
            plan=step.plan,
            platform=step.platform,
            memory=CompiledMemory.of(program),
            estimate=step.memory(),
            messages=_messages(traffic, found, launches),
            products=product_flops(program, longest_loop=longest),
            seconds=seconds,
            peak_memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )

    @property
    def estimate_ratio(self) -> float:
        """The estimated memory as a share of the compiled program's."""
        return self.estimate.bytes / self.memory.bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, dicts, strings and numbers."""
        return {
            "compile_seconds": round(self.seconds, 1),
            "compile_peak_memory_bytes": self.peak_memory_bytes,
            "memory_bytes": dataclasses.asdict(self.memory) | {"total": self.memory.bytes},
            "estimated_memory_bytes": self.estimate.bytes,
            "product_flops": self.products.flops,
            "product_loops_of_unknown_length": len(self.products.unknown_loops),
            "messages": [each.to_json() for each in self.messages],
        }


def _messages(
    traffic: Traffic, found: tuple[Flight, ...], launches: tuple[Launch, ...]
) -> tuple[Messages, ...]:
    flight_of = {flight.collective.name: flight for flight in found}
    launch_of = {launch.instruction: launch for launch in launches}
    axes_of: dict[str, set[str]] = collections.defaultdict(set)

    def start(collective: Collective) -> str:
        flight = flight_of.get(collective.name)
        return flight.start if flight else collective.name

    for each in traffic.collectives:
        axes_of[start(each)].add(",".join(each.axes))
    groups: dict[tuple[tuple[str, ...], str], list[Collective]] = {}
    for each in traffic.collectives:
        groups.setdefault((each.axes, each.kind), []).append(each)
    order = {name: position for position, (name, _) in enumerate(traffic.mesh)}
    result = []
    for (axes, kind), group in groups.items():
        launched = [launch_of[start(each)] for each in group if start(each) in launch_of]
        beside = (each for each in group if each.name in flight_of)
        together = {name for launch in launched for name in launch.together}
        result.append(
            Messages(
                axes,
                kind,
                count=sum(each.executions for each in group),
                payloads=sum(
                    each.executions
                    for each in group
                    if each.bytes_sent >= LEAST_PAYLOAD_BYTES * each.executions
                ),
                bytes_sent=sum((each.bytes_sent for each in group), Fraction(0)),
                at_least=any(each.at_least for each in group),
                bytes_beside_compute=sum(
                    (each.bytes_sent for each in beside if flight_of[each.name].products),
                    Fraction(0),
                ),
                streams=tuple(sorted({launch.stream or "compute" for launch in launched})),
                together=tuple(sorted({axes for name in together for axes in axes_of[name]})),
            )
        )
    return tuple(sorted(result, key=lambda each: ([order[a] for a in each.axes], each.kind)))
