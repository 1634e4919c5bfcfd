"""Translation of JAX's errors from a broken collective into the name of the lost process."""

import contextlib
import threading
import time
from collections.abc import Iterator

import jax
import jax.errors

from geojax.errors import LostContactError
from geojax.job.exit_messages import first_line, lost_contact
from geojax.runtime.liveness.health import quiet_processes

reporting_lost_contact = threading.Lock()
"""Lock that the first thread to find a process gone takes for good; it reports and ends this."""

HAND_OVER_SECONDS = 5.0
"""Time that the other threads of this process leave to the one that reports."""


@contextlib.contextmanager
def translate_collective_errors() -> Iterator[None]:
    """Re-raise JAX's errors from a broken collective or barrier as a `LostContactError`.

    JAX reports that a connection closed, but not whose. The processes whose heartbeat stops in
    the seconds that follow are named. In a job of one process JAX's error passes unchanged.

    Raises:
        LostContactError: a collective or barrier inside failed.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or "RESOURCE_EXHAUSTED" in str(error):
            raise
        quiet = quiet_processes()
        if not reporting_lost_contact.acquire(blocking=False):
            time.sleep(HAND_OVER_SECONDS)
        who = f": {quiet} sent no heartbeat any more" if quiet.size else ""
        raise LostContactError(lost_contact(f"{who} ({first_line(error)})")) from error
