"""Simulated CPU devices of this process, which have to be set before JAX starts its backend."""

import os

import jax

from geojax.errors import UserError
from geojax.runtime.host_memory import keep_freed_memory
from geojax.runtime.jax_private import backend_runs

# The threads that XLA's CPU client starts, as a multiple of the devices: a collective holds one
# thread per device while the next step's computations need others, and with fewer the process
# aborts at XLA's rendezvous timeout once two steps are in flight. More than that cost time: each
# looks for work where there is none, and large operations are cut into as many pieces.
THREADS_PER_DEVICE = 4


def simulate_devices(count: int) -> None:
    """Give this process `count` CPU devices and no others, whatever hardware it runs on.

    Call it before the first JAX operation (importing jax is no operation). It also raises the
    environment variable NPROC, from which XLA sizes its thread pools. The value is
    `THREADS_PER_DEVICE` a device, or the number of cores if that is larger. JAX reads NPROC when
    the backend starts, not at its import.

    Raises:
        UserError: `count` is not positive, or a backend with other devices already runs.
    """
    if count < 1:
        raise UserError(f"simulate_devices({count}): the number of devices must be at least 1")
    if backend_runs():
        devices = jax.local_devices()
        platform = devices[0].platform
        if platform != "cpu" or len(devices) != count:
            raise UserError(
                f"simulate_devices({count}) comes too late: JAX already runs with {len(devices)} "
                f"{platform} device(s); call it before the first JAX operation"
            )
        return
    jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_platforms", "cpu")
    cores = len(os.sched_getaffinity(0))
    threads = max(THREADS_PER_DEVICE * count, cores, _threads_asked_for())
    os.environ["NPROC"] = str(threads)
    keep_freed_memory()


def _threads_asked_for() -> int:
    given = os.environ.get("NPROC", "")
    return int(given) if given.isdecimal() else 0
