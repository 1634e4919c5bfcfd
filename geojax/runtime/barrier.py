"""A named barrier between the processes of a job that reports the process that is missing.

It goes through JAX's coordination service, in process 0, and needs no device.
"""

import collections

import jax
import jax.errors

from geojax.errors import MissingProcessesError
from geojax.runtime.jax_private import coordination_client
from geojax.runtime.key_value_store import publish, published
from geojax.runtime.liveness.exit_messages import describe
from geojax.runtime.liveness.lost_contact import translate_collective_errors

_calls: collections.Counter[str] = collections.Counter()


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until every process of the job has reached the barrier called `name`.

    A name may be used again; the n-th call of one process meets the n-th call of the others. In a
    job of one process this returns at once.

    Raises:
        MissingProcessesError: some process did not arrive within `timeout_seconds`; it is named.
        LostContactError: the processes cannot reach each other any more.
    """
    client = coordination_client()
    if client is None:
        return
    _calls[name] += 1
    meeting = f"barrier/{name}/{_calls[name]}"
    arrival = f"{meeting}/{jax.process_index()}"
    publish(arrival, "arrived")
    try:
        client.wait_at_barrier(f"geojax/{meeting}", int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            with translate_collective_errors():
                raise
        arrived = {int(process) for process in published(meeting)}
        missing = [process for process in range(jax.process_count()) if process not in arrived]
        who = describe(missing) or "a process (it arrived just after that)"
        raise MissingProcessesError(
            f"barrier '{name}': {who} did not come within {timeout_seconds:g} seconds", missing
        ) from None
    client.key_value_delete(f"geojax/{arrival}")
