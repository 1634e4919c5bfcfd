"""A step compiled ahead of time: memory, messages, and what overlaps with what.

All figures are read from the compiled program: the compiler's account of memory, the HLO's
collectives, and for GPUs the streams on which the runtime launches them.
"""

import collections
import dataclasses
import resource
import tempfile
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from geojax.hlo import Collective, Traffic, collective_traffic
from geojax.hlo.overlap import Flight, flights
from geojax.hlo.products import ProductFlops, product_flops
from geojax.hlo.thunks import Launch, read_launches
from geojax.planner.memory import CompiledMemory, TracedStep
from geojax.planner.memory_phases import StepMemory
from geojax.planner.passes import longest_loop
from geojax.planner.step_traffic import by_ticks
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
    """Number of messages of a device; in a pipeline in the mean over its stages."""
    payloads: int
    """Number of those that carry a bucket or hop: `LEAST_PAYLOAD_BYTES` or more."""
    bytes_sent: Fraction
    """Bytes that a device sends."""
    at_least: bool
    """True if a loop around one of them runs as often as data of the run say, and counts once."""
    bytes_beside_compute: Fraction
    """Bytes in messages that travel while matrix products run."""
    bytes_awaited: Fraction
    """Bytes in messages that the compute waits for, on its own stream."""
    streams: Mapping[str, int]
    """Messages by the communication stream on which they are launched; "compute" where the compute
    waits."""
    together: Mapping[str, Fraction]
    """Bytes that are in flight with collectives on other streams, by the axes of those."""

    def to_json(self) -> dict[str, Any]:
        """Return plain lists, strings and numbers."""
        numbers = {
            "bytes_sent": float(self.bytes_sent),
            "bytes_beside_compute": float(self.bytes_beside_compute),
            "bytes_awaited": float(self.bytes_awaited),
            "together": {axes: float(sent) for axes, sent in self.together.items()},
        }
        return dataclasses.asdict(self) | {"axes": ",".join(self.axes)} | numbers


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A step's program for the devices of its mesh, and the launches of its collectives."""

    program: jax.stages.Compiled
    launches: tuple[Launch, ...]
    """In the order of the launches; none on CPUs."""

    @classmethod
    def of(cls, step: TracedStep, options: Mapping[str, Any] | None = None) -> "CompiledProgram":
        """Compile `step`.

        Args:
            step: the step.
            options: compiler options that replace those that geojax sets, or come on top.
        """
        own: dict[str, Any] = {}
        gpu = step.platform.name == "gpu"
        with tempfile.TemporaryDirectory(prefix="geojax-") as folder, without_compilation_cache():
            if gpu:
                own |= gpu_compiler_options() | {"xla_dump_to": folder}
            own |= step.plan.compiler_options or {}
            program = step.lowered.compile(compiler_options=own | dict(options or {}))
            return cls(program, read_launches(Path(folder)) if gpu else ())

    def messages(self, plan: StepPlan) -> tuple[Messages, ...]:
        """Read the collectives, in the order of the mesh's axes."""
        longest = longest_loop(plan)
        traffic = collective_traffic(self.program, plan.mesh, longest_loop=longest)
        found = flights(self.program, plan.mesh, longest_loop=longest) if self.launches else ()
        return messages_by_kind(by_ticks(traffic, plan), found, self.launches)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step, and what compiling it took on this machine."""

    plan: StepPlan
    platform: Platform
    memory: CompiledMemory
    estimate: StepMemory
    traffic: Traffic
    """The collectives that the step asks for, before the compiler."""
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
        began = time.monotonic()
        compiled = CompiledProgram.of(step)
        seconds = time.monotonic() - began
        program, plan = compiled.program, step.plan
        return cls(
            plan=plan,
            platform=step.platform,
            memory=CompiledMemory.of(program, attention=step.memory.attention),
            estimate=step.memory,
            traffic=step.traffic,
            messages=compiled.messages(plan),
            products=product_flops(program, longest_loop=longest_loop(plan)),
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


def messages_by_kind(
    traffic: Traffic, found: tuple[Flight, ...], launches: tuple[Launch, ...]
) -> tuple[Messages, ...]:
    """Group the collectives of a program by axes and kind, in the order of the mesh's axes.

    Args:
        traffic: the collectives.
        found: the asynchronous ones, on GPUs.
        launches: those of the runtime for GPUs.
    """
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
        beside = (each for each in group if each.name in flight_of)
        streams: dict[str, Fraction] = collections.defaultdict(Fraction)
        together: dict[str, Fraction] = collections.defaultdict(Fraction)
        awaited = Fraction(0)
        for each in group:
            launch = launch_of.get(start(each))
            if launch is None:
                continue
            streams[launch.stream or "compute"] += each.share * each.executions
            awaited += each.bytes_sent if launch.stream is None else 0
            for others in {name for other in launch.together for name in axes_of[other]}:
                together[others] += each.bytes_sent
        result.append(
            Messages(
                axes,
                kind,
                count=round(sum(each.share * each.executions for each in group)),
                payloads=round(
                    sum(each.share * each.executions for each in group if _is_payload(each))
                ),
                bytes_sent=sum((each.bytes_sent for each in group), Fraction(0)),
                at_least=any(each.at_least for each in group),
                bytes_beside_compute=sum(
                    (each.bytes_sent for each in beside if flight_of[each.name].products),
                    Fraction(0),
                ),
                bytes_awaited=awaited,
                streams={name: round(count) for name, count in sorted(streams.items())},
                together=dict(sorted(together.items())),
            )
        )
    return tuple(sorted(result, key=lambda each: ([order[a] for a in each.axes], each.kind)))


def _is_payload(collective: Collective) -> bool:
    """Return True if each message of a collective carries a bucket or hop."""
    sent = collective.bytes_sent / (collective.share or 1)
    return sent >= LEAST_PAYLOAD_BYTES * collective.executions
