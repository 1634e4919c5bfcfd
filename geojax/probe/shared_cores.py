"""Times of devices that are simulated on a few cores, which messages between sites need too.

Sums over sites run as in a step of one program, in each wire format, on all devices at once: short
ones for what a message takes at least, long ones for the rate. The same encoding and decoding
without the message in between says what of it is compute. An update is timed in the same way, since
the memory of one device alone, in its core's caches, is far faster. So is what a host takes to
start a program of many arrays.
"""

import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.collectives import FLOAT32, WireFormat, wire_format
from geojax.collectives.axes import vary_over
from geojax.collectives.exchange import SiteSum
from geojax.collectives.wire_format import decode_sum, encode_numbers
from geojax.layout_names import WireName
from geojax.mesh import AXES
from geojax.probe.context import ProbeContext
from geojax.probe.exchange import TIMEOUT_SECONDS, collect
from geojax.runtime import Watchdog, WatchdogSettings, barrier
from geojax.runtime.platform import sums_in_messages
from geojax.topology import SharedCores

_SHORT, _LONG = 2**8, 2**20
"""Numbers of a device in a message: at least a block of int8, and 4 MiB in float32."""
_ADAM_ARRAYS = 4
"""Weights, gradient and two moments."""
_ARRAYS = 100
_ROUNDS = 5


class _Times(NamedTuple):
    """Medians of a program's runs."""

    seconds: float
    processor_seconds: float
    """Processor time of all threads of the process."""


def measured_shared_cores(context: ProbeContext) -> SharedCores | None:
    """Measure the sums over sites of a job on CPUs; every process of the job calls this.

    Returns:
        The times of the slowest process; None where Gloo carries no sums between sites.

    Raises:
        MissingProcessesError: some process did not arrive.
    """
    if not sums_in_messages(context.mesh):
        return None
    formats = {name: wire_format(name) or FLOAT32 for name in get_args(WireName)}
    crossing = {
        name: _compiled(context.mesh, _crossing(wire), _LONG) for name, wire in formats.items()
    }
    inside = {name: _compiled(context.mesh, _inside(wire), _LONG) for name, wire in formats.items()}
    short = _compiled(context.mesh, _crossing(FLOAT32), _SHORT)
    update = _compiled(context.mesh, _adam, _LONG)
    many = _of_many_arrays(context.mesh)
    programs = [short, crossing["none"], update, many, *inside.values()]
    barrier("probe: sums over sites are compiled", TIMEOUT_SECONDS)
    limits = WatchdogSettings(first_step_seconds=TIMEOUT_SECONDS, minimum_seconds=TIMEOUT_SECONDS)
    with Watchdog(limits) as watchdog, watchdog.step(0, "probe"):
        own = [_measured(program) for program in programs]
    answers = [json.loads(text) for text in collect("shared cores", json.dumps(own))]
    slowest = [
        _Times(*map(max, zip(*of_program, strict=True)))
        for of_program in zip(*answers, strict=True)
    ]
    (least, long, updated, started, *local), devices = slowest, len(jax.local_devices())
    sent = FLOAT32.message_bytes(_LONG)
    alone = local[0]
    return SharedCores(
        devices_per_core=max(1.0, devices / len(os.sched_getaffinity(0))),
        update_seconds_per_number=updated.seconds / (_LONG // _ADAM_ARRAYS),
        message_seconds=least.seconds,
        message_bytes_per_second=sent / max(long.seconds - least.seconds - alone.seconds, 1e-9),
        processor_seconds_per_byte=max(
            0.0, (long.processor_seconds - alone.processor_seconds) / (devices * sent)
        ),
        encode_seconds_per_number={
            name: each.seconds / _LONG for name, each in zip(formats, local, strict=True)
        },
        program_seconds=started.seconds,
    )


def _crossing(wire: WireFormat) -> Callable[[jax.Array], jax.Array]:
    """Return the sum over sites of a vector, in a wire format."""
    keeps = wire.needs_error_feedback

    def sum_over_sites(x: jax.Array) -> jax.Array:
        summed = SiteSum.start(x, ("dc",), wire, keep_error=keeps).exchange().done()
        return summed.total if summed.error is None else summed.total + summed.error

    return sum_over_sites


def _inside(wire: WireFormat) -> Callable[[jax.Array], jax.Array]:
    """Return the same work on a vector without the message in between."""

    def encode_and_add(x: jax.Array) -> jax.Array:
        encoded = encode_numbers(x, wire)
        messages = jax.lax.optimization_barrier((encoded.messages, encoded.messages))
        total = decode_sum(messages, x.size, wire, x.dtype)
        return total + encoded.error if wire.needs_error_feedback else total

    return encode_and_add


def _adam(x: jax.Array) -> jax.Array:
    """Return a quarter of a vector as Adam updates it, by the other three quarters."""
    weights, gradient, mean, square = x.reshape(_ADAM_ARRAYS, -1)
    mean = 0.9 * mean + 0.1 * gradient
    square = 0.95 * square + 0.05 * gradient**2
    step = mean / (jnp.sqrt(jnp.abs(square)) + 1e-8) + 0.1 * weights
    return jnp.concatenate([weights - 1e-3 * step, mean, square])


def _compiled(
    mesh: Mesh, function: Callable[[jax.Array], jax.Array], count: int
) -> Callable[[], Any]:
    """Compile a function of a vector of `count` numbers on every device."""
    everywhere = PartitionSpec(AXES)
    mapped = jax.shard_map(
        lambda x: vary_over(function(x), frozenset(AXES)),
        mesh=mesh,
        in_specs=everywhere,
        out_specs=everywhere,
    )
    sharding = NamedSharding(mesh, everywhere)
    shape = jax.ShapeDtypeStruct((count * mesh.devices.size,), jnp.float32, sharding=sharding)
    program = jax.jit(mapped).lower(shape).compile()
    argument = jax.jit(
        lambda: jnp.sin(jnp.arange(shape.size, dtype=jnp.float32)), out_shardings=sharding
    )()
    return functools.partial(program, argument)


def _of_many_arrays(mesh: Mesh) -> Callable[[], Any]:
    """Compile a program of short arrays, as many as those of a few layers."""
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    arrays = jax.jit(
        lambda: [jnp.full(mesh.devices.size, float(number)) for number in range(_ARRAYS)],
        out_shardings=sharding,
    )()
    program = jax.jit(lambda given: [each + 1 for each in given]).lower(arrays).compile()
    return functools.partial(program, arrays)


def _measured(program: Callable[[], Any]) -> _Times:
    jax.block_until_ready(program())  # the first run finds its peers and buffers
    seconds, processor = [], []
    for _ in range(_ROUNDS):
        started, processor_started = time.perf_counter(), time.process_time()
        jax.block_until_ready(program())
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - processor_started)
    return _Times(statistics.median(seconds), statistics.median(processor))
