"""All uses of JAX's private modules; checked with JAX 0.10 and 0.11."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import distributed, profiler, xla_bridge
from jax._src.lib import _jax


def backend_runs() -> bool:
    """Return whether JAX has started a backend; after that, flags and device counts are fixed."""
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any | None:
    """Return this process's client of JAX's coordination service; None in a job of one process."""
    return distributed.global_state.client


def process_index_and_count() -> tuple[int, int]:
    """Return this process's index and the number of processes, without starting the backend.

    JAX's own functions start it, and processes wait for each other there.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


def abandon_profile() -> None:
    """Forget a profile that could not be written; JAX would refuse to begin another one."""
    profiler._profile_state.reset()


@contextlib.contextmanager
def calling_when_service_is_lost(act: Callable[[Any], None]) -> Iterator[None]:
    """Make a client of the coordination service that is created inside call `act` when it is lost.

    JAX's own callback writes a stack trace and aborts. `jaxlib` cannot convert the argument of this
    call, an `absl::Status`, into a Python object: it throws an exception that nobody catches, so
    that a handler of those (`geojax.runtime.liveness.uncaught`) has to act.
    """
    make = _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=act)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make
