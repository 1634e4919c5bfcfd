"""Speed of each device at matrix products and at reading its memory.

Every process measures its own devices, one at a time; processes on one host take turns. A round
covers all devices before the next one begins, so that other load on a host slows them all alike,
and the median over rounds counts.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from geojax.accelerators import Precision
from geojax.probe.context import ProbeContext
from geojax.probe.exchange import collect, turns
from geojax.probe.figures import DeviceFigures
from geojax.probe.outliers import slow_ones
from geojax.runtime.platform import platform_named

ROUNDS = 7


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one measurement: some tens of milliseconds of a device's time."""

    matrix: int
    """Rows and columns of the matrices."""
    products: int
    """Number of matrix products, each with the result of the one before."""
    vector_bytes: int
    """Size of the vector, which should be too large for any cache."""
    sweeps: int
    """Number of times that the vector is read and written."""

    @property
    def operations(self) -> float:
        """Floating-point operations of the products; a multiply-add counts as two."""
        return 2.0 * self.matrix**3 * self.products

    @property
    def bytes_moved(self) -> float:
        """Bytes that the sweeps read and write."""
        return 2.0 * self.vector_bytes * self.sweeps


ON_CPU = Work(matrix=1024, products=4, vector_bytes=2**26, sweeps=4)
ON_ACCELERATOR = Work(matrix=8192, products=16, vector_bytes=2**30, sweeps=16)


def default_dtype(device: jax.Device) -> Precision:
    """Return the dtype of matrix products in training on such a device, unless configured."""
    return "float32" if platform_named(device.platform).host_devices else "bfloat16"


def measured_devices(
    context: ProbeContext, dtype: str, work: Work | None = None
) -> list[DeviceFigures]:
    """Measure every device of the job and judge it; every process of the job calls this.

    If a device is far slower than others of its kind, all are measured a second time, and it counts
    as slow only if it is slow again.

    Args:
        context: the processes and their devices.
        dtype: name of the dtype of the matrix products.
        work: the work of a measurement; None: the platform's default.

    Raises:
        MissingProcessesError: some process did not arrive.
    """
    if work is None:
        on_host = platform_named(jax.local_devices()[0].platform).host_devices
        work = ON_CPU if on_host else ON_ACCELERATOR
    data = _data(work, dtype)
    here = [(site, _Bench(device, work, *data)) for site, device in context.own_devices]
    del data
    found = _rounds(context, here)
    suspects = slow_devices(found)
    if not suspects:
        return found
    again = _rounds(context, here)
    slow = suspects & slow_devices(again)
    return [
        each.model_copy(update={"verdict": "slow" if each.device in slow else "ok"})
        for each in again
    ]


def slow_devices(figures: list[DeviceFigures]) -> set[int]:
    """Return the ids of devices far slower than others of their kind, in products or memory."""
    found: set[int] = set()
    for kind in {each.kind for each in figures}:
        alike = [each for each in figures if each.kind == kind]
        found.update(slow_ones({each.device: each.flops_per_second for each in alike}))
        found.update(slow_ones({each.device: each.bytes_per_second for each in alike}))
    return found


def _rounds(context: ProbeContext, here: list[tuple[str, "_Bench"]]) -> list[DeviceFigures]:
    """Measure all devices in several rounds; return the medians, by process."""
    rates: list[list[tuple[float, float]]] = [[] for _ in here]
    for _ in range(ROUNDS):
        for _ in turns("a round over the devices", *context.turn()):
            for (_, bench), so_far in zip(here, rates, strict=True):
                so_far.append(bench.measure())
    own = [
        DeviceFigures(
            site=site,
            host=context.own_host,
            process=jax.process_index(),
            device=bench.device.id,
            kind=bench.device.device_kind,
            flops_per_second=statistics.median(flops for flops, _ in of_device),
            bytes_per_second=statistics.median(moved for _, moved in of_device),
        )
        for (site, bench), of_device in zip(here, rates, strict=True)
    ]
    answers = collect("devices", json.dumps([each.model_dump() for each in own]))
    return [DeviceFigures.model_validate(each) for text in answers for each in json.loads(text)]


class _Bench:
    """One device, with the measured programs compiled and their data in place."""

    def __init__(
        self,
        device: jax.Device,
        work: Work,
        left: jax.Array,
        right: jax.Array,
        vector: jax.Array,
    ):
        self.device, self._work = device, work
        self._left, self._right = jax.device_put((left, right), device)
        # A copy of its own also where the data were made: it is written in place.
        self._vector = jax.device_put(vector, device, may_alias=False)
        self.measure()

    def measure(self) -> tuple[float, float]:
        """Measure operations per second, and bytes of memory per second."""
        products = _seconds(lambda: _products(self._left, self._right, self._work.products))

        def sweep() -> jax.Array:
            self._vector = _sweeps(self._vector, jnp.float32(1), self._work.sweeps)
            return self._vector

        return self._work.operations / products, self._work.bytes_moved / _seconds(sweep)


def _data(work: Work, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Make two matrices and a vector, once for all devices of this process.

    Random numbers cost a GPU more power than zeros; products of these keep their size.
    """
    with jax.default_device(jax.local_devices()[0]):
        shape = (2, work.matrix, work.matrix)
        left, right = (jax.random.normal(jax.random.key(0), shape) / work.matrix**0.5).astype(dtype)
        return left, right, jnp.ones(work.vector_bytes // 4, jnp.float32)


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


@jax.jit(static_argnums=2)
def _products(left: jax.Array, right: jax.Array, count: int) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, product: product @ right, left)


@jax.jit(static_argnums=2, donate_argnums=0)
def _sweeps(vector: jax.Array, factor: jax.Array, count: int) -> jax.Array:
    return lax.fori_loop(0, count, lambda _, vector: vector * factor, vector)
