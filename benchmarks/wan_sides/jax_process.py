"""How a contestant of JAX starts its processes: as geojax does, with the flags that it sets."""

from typing import Any

from geojax import runtime

COORDINATOR_PORT = 29_400
PATIENCE_SECONDS = 300.0


def join(work: dict[str, Any]) -> None:
    """Make this process one of the two, with its CPU devices."""
    runtime.start(
        runtime.ProcessSettings(
            coordinator=f"{work['coordinator']}:{COORDINATOR_PORT}",
            process_count=2,
            process_id=work["process"],
            site=work["site"],
            simulated_devices=work["devices"],
            start_timeout_seconds=PATIENCE_SECONDS,
        )
    )
