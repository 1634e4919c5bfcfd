"""Networks inside the sites, measured by the collectives of training in all sites at once.

They are measured inside a host, between its accelerators, and between the hosts of a site, each
accelerator with its counterparts on the other hosts. Bandwidth is bus bandwidth as nccl-tests
define it (PERFORMANCE.md there): the rate at which each device sends, whatever the collective and
the number of devices, so that it compares with the rate of the wire.
"""

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.hlo.conventions import BYTES_SENT
from geojax.mesh import AXES
from geojax.probe.context import ProbeContext
from geojax.probe.exchange import TIMEOUT_SECONDS, collect
from geojax.probe.figures import CollectiveFigures, CollectiveName, NetworkFigures, Scope
from geojax.probe.outliers import slow_ones
from geojax.runtime import Watchdog, WatchdogSettings, barrier
from geojax.runtime.platform import platform_of

SIZES_ON_CPU = (2**14, 2**18, 2**22)
SIZES_ON_ACCELERATOR = (2**16, 2**20, 2**24, 2**28)

_SCOPES: dict[Scope, str] = {"inside host": "tensor", "between hosts": "data"}
_COLLECTIVES: tuple[CollectiveName, ...] = ("all-reduce", "reduce-scatter", "all-gather")
_ROUNDS = 5
_HOPS = 8
# Simulated devices share threads, and several collectives in flight on them may starve.
_IN_FLIGHT_ON_ACCELERATOR = 10
# Sites share a machine's cores where they are simulated, and a network is noisier than a device.
_FLOOR = 0.4


def bus_bandwidth(
    collective: CollectiveName, message_bytes: int, devices: int, seconds: float
) -> float:
    """Compute the bytes per second that each of `devices` sends in a collective of `seconds`.

    By nccl-tests' convention `message_bytes` is the whole message: the summands of a device, or all
    that it has gathered. Bus bandwidth is then message_bytes / seconds times
    2 (n - 1) / n for an all-reduce, (n - 1) / n for the other two.
    """
    payload = message_bytes // devices if collective == "all-gather" else message_bytes
    return float(BYTES_SENT[collective](payload, devices)) / seconds


def measured_networks(
    context: ProbeContext, sizes: Sequence[int] | None = None
) -> tuple[list[CollectiveFigures], list[NetworkFigures]]:
    """Measure every network of more than one device in every site; every process calls this.

    If a site is far slower than the others with the largest message, all are measured once more.

    Args:
        context: the processes and their devices.
        sizes: sizes of the messages, in bytes; None: the platform's default.

    Raises:
        MissingProcessesError: some process did not arrive.
    """
    on_cpu = platform_of(context.mesh).host_devices
    sizes = sizes or (SIZES_ON_CPU if on_cpu else SIZES_ON_ACCELERATOR)
    in_flight = 1 if on_cpu else _IN_FLIGHT_ON_ACCELERATOR
    programs = list(_programs(context.mesh, sizes))
    if not programs:
        return [], []
    # Some collectives fail when their ranks arrive far apart, so all compile before they start.
    barrier("probe: collectives are compiled", TIMEOUT_SECONDS)
    limits = WatchdogSettings(first_step_seconds=TIMEOUT_SECONDS, minimum_seconds=TIMEOUT_SECONDS)
    with Watchdog(limits) as watchdog, watchdog.step(0, "probe"):
        collectives, networks = _rounds(context, programs, in_flight)
        suspects = slow_networks(collectives)
        if not suspects:
            return collectives, networks
        again, networks = _rounds(context, programs, in_flight)
    slow = suspects & slow_networks(again)
    verdicts = ["slow" if _key(each) in slow else "ok" for each in again]
    return [
        each.model_copy(update={"verdict": verdict})
        for each, verdict in zip(again, verdicts, strict=True)
    ], networks


Key = tuple[str, Scope, CollectiveName]


def slow_networks(figures: Sequence[CollectiveFigures]) -> set[Key]:
    """Find collectives far slower than the same one in the same network of the other sites."""
    found: set[Key] = set()
    for scope, collective in itertools.product(_SCOPES, _COLLECTIVES):
        alike = [each for each in figures if (each.scope, each.collective) == (scope, collective)]
        rates = {_key(each): each.bus_bytes_per_second for each in alike}
        largest = {key: of_sizes[max(of_sizes)] for key, of_sizes in rates.items()}
        found.update(slow_ones(largest, _FLOOR))
    return found


def _key(figures: CollectiveFigures) -> Key:
    return figures.site, figures.scope, figures.collective


@dataclasses.dataclass(frozen=True)
class _Program:
    """A compiled collective and its argument."""

    scope: Scope
    collective: CollectiveName | None
    """Name of the collective; None for permutes from neighbor to neighbor."""
    message_bytes: int
    devices: int
    run: Any
    argument: jax.Array

    def seconds(self, in_flight: int) -> float:
        """Measure the time of one run, of `in_flight` that are started together."""
        start = time.perf_counter()
        jax.block_until_ready([self.run(self.argument) for _ in range(in_flight)])
        return (time.perf_counter() - start) / in_flight


def _programs(mesh: Mesh, sizes: Sequence[int]) -> Iterator[_Program]:
    for scope, axis in _SCOPES.items():
        devices = mesh.shape[axis]
        if devices == 1:
            continue
        yield _compiled(mesh, scope, None, 4, devices)
        for collective, size in itertools.product(_COLLECTIVES, sizes):
            yield _compiled(mesh, scope, collective, size, devices)


def _compiled(
    mesh: Mesh, scope: Scope, collective: CollectiveName | None, size: int, devices: int
) -> _Program:
    axis = _SCOPES[scope]

    def program(x: jax.Array) -> jax.Array:
        if collective == "all-reduce":
            return lax.pcast(lax.psum(x, axis), axis, to="varying")
        if collective == "reduce-scatter":
            return lax.psum_scatter(x, axis, tiled=True)
        if collective == "all-gather":
            return lax.all_gather(x, axis, tiled=True)
        for _ in range(_HOPS):
            x = lax.ppermute(x, axis, [(rank, (rank + 1) % devices) for rank in range(devices)])
        return x

    input_bytes = size // devices if collective == "all-gather" else size
    # A multiple of the devices, so that each gets an equal part.
    numbers = -(-input_bytes // (4 * devices)) * devices if collective else 1
    everywhere = PartitionSpec(AXES)
    sharding = NamedSharding(mesh, everywhere)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
    shape = jax.ShapeDtypeStruct((numbers * mesh.devices.size,), jnp.float32, sharding=sharding)
    compiled = jax.jit(mapped).lower(shape).compile()
    argument = jax.jit(lambda: jnp.ones(shape.shape, shape.dtype), out_shardings=sharding)()
    return _Program(scope, collective, size, devices, compiled, argument)


def _rounds(
    context: ProbeContext, programs: Sequence[_Program], in_flight: int
) -> tuple[list[CollectiveFigures], list[NetworkFigures]]:
    """Measure all programs in several rounds; return the medians of every site."""
    for program in programs:  # the first run finds its peers and buffers
        program.seconds(1)
    times = [[program.seconds(in_flight) for program in programs] for _ in range(_ROUNDS)]
    own = [statistics.median(of_program) for of_program in zip(*times, strict=True)]
    answers = [json.loads(text) for text in collect("collectives", json.dumps(own))]
    collectives: dict[Key, dict[int, float]] = {}
    networks, devices = [], {}
    for site in context.topology.sites:
        members = site.processes or (0,)
        for index, program in enumerate(programs):
            seconds = statistics.median(answers[member][index] for member in members)
            if program.collective is None:
                trip = 2 * seconds / _HOPS
                networks.append(
                    NetworkFigures(site=site.name, scope=program.scope, round_trip_seconds=trip)
                )
                continue
            what = (program.collective, program.message_bytes, program.devices)
            key = (site.name, program.scope, program.collective)
            collectives.setdefault(key, {})[program.message_bytes] = bus_bandwidth(*what, seconds)
            devices[key] = program.devices
    found = [
        CollectiveFigures(
            site=site,
            scope=scope,
            collective=collective,
            devices=devices[site, scope, collective],
            bus_bytes_per_second=rates,
        )
        for (site, scope, collective), rates in collectives.items()
    ]
    return found, networks
