"""Everything that geojax takes from JAX's private modules; checked with JAX 0.10 and 0.11."""

from typing import Any

from jax._src import distributed, xla_bridge


def backend_runs() -> bool:
    """Whether JAX has started a backend, after which flags and device counts come too late."""
    return xla_bridge.backends_are_initialized()


def coordination_client() -> Any | None:
    """This process's client of JAX's coordination service; None in a job of one process."""
    return distributed.global_state.client
