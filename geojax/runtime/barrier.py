"""A named barrier between the processes of a job that reports the process that is missing.

It goes through JAX's coordination service, in process 0, and needs no device.
"""

import collections
import json

import jax.errors

from geojax.errors import MissingProcessesError
from geojax.job.exit_messages import NAMED_PROCESSES, describe
from geojax.runtime.jax_private import coordination_client, process_index_and_count
from geojax.runtime.key_value_store import await_published, publish, published
from geojax.runtime.liveness.lost_contact import translate_collective_errors

_calls: collections.Counter[str] = collections.Counter()
# Time that process 0 has to say who is missing, if it is there itself.
_ANSWER_SECONDS = 5.0


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
    meeting = f"{name}/{_calls[name]}"
    own, _ = process_index_and_count()
    publish(f"arrived/{meeting}/{own}", "")
    try:
        client.wait_at_barrier(f"geojax/{meeting}", int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            with translate_collective_errors():
                raise
        missing, count = _missing(meeting)
        who = describe(missing, count) or "a process (it arrived just after that)"
        raise MissingProcessesError(
            f"barrier '{name}': {who} did not come within {timeout_seconds:g} seconds", missing
        ) from None


def _missing(meeting: str) -> tuple[list[int], int]:
    """Return the first of the processes that are missing, and their number.

    Process 0 reads who has arrived, and tells the others, if they are not waiting for it.
    """
    own, count = process_index_and_count()
    if own == 0:
        arrived = published(f"arrived/{meeting}")
        missing = [process for process in range(count) if str(process) not in arrived]
        publish(f"missing/{meeting}", json.dumps([missing[:NAMED_PROCESSES], len(missing)]))
        return missing, len(missing)
    answer = await_published(f"missing/{meeting}", _ANSWER_SECONDS)
    if answer is None:
        return [0], 1
    first, number = json.loads(answer)
    return first, number
