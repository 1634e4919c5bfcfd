"""Everything that geojax takes from JAX's private modules; checked with JAX 0.10 and 0.11."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import distributed, xla_bridge
from jax._src.lib import _jax


def backend_runs() -> bool:
    """Whether JAX has started a backend, after which flags and device counts come too late."""
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any | None:
    """This process's client of JAX's coordination service; None in a job of one process."""
    return distributed.global_state.client


def place_in_job() -> tuple[int, int]:
    """This process's index and the number of processes.

    JAX's own functions start the backend, for which processes wait for each other.
    """
    return distributed.global_state.process_id, distributed.global_state.num_processes


@contextlib.contextmanager
def calling_when_service_is_lost(act: Callable[[Any], None]) -> Iterator[None]:
    """A client of the coordination service that is made inside calls `act` when it loses it.

    JAX's own writes a stack trace and aborts. `jaxlib` cannot turn the argument of this call, an
    `absl::Status`, into a Python object: it throws an exception that nobody catches, so that a
    handler of those (`geojax.runtime.uncaught`) has to act.
    """
    make = _jax.get_distributed_runtime_client
    _jax.get_distributed_runtime_client = functools.partial(make, missed_heartbeat_callback=act)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make
