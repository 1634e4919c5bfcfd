"""Agreement of all processes of a job on what each of them, or the first one, finds out."""

import collections
import json

from geojax.errors import MissingProcessesError
from geojax.runtime.barrier import barrier
from geojax.runtime.jax_private import process_index_and_count
from geojax.runtime.key_value_store import await_published, publish, published
from geojax.runtime.liveness.health import Group

_calls: collections.Counter[str] = collections.Counter()


def value_of_first(name: str, own_value: str, timeout_seconds: float) -> str:
    """Return the value called `name` of process 0, which decides for all.

    All processes call it, equally often for a name.

    Raises:
        MissingProcessesError: process 0 did not say within `timeout_seconds`.
    """
    own, count = process_index_and_count()
    if count == 1:
        return own_value
    _calls[name] += 1
    key = f"first/{name}/{_calls[name]}"
    if own == 0:
        publish(key, own_value)
        return own_value
    answer = await_published(key, timeout_seconds)
    if answer is None:
        raise MissingProcessesError(f"{name}: process 0 does not say what it decided", [0])
    return answer


def processes_that_differ(name: str, own_value: str, timeout_seconds: float) -> Group:
    """Return the processes in which the value called `name` is another than in process 0.

    All processes call it, equally often for a name, and get the same answer; process 0 compares. In
    a job of one process nobody differs.

    Raises:
        MissingProcessesError: some process did not arrive within `timeout_seconds`; it is named.
    """
    own, count = process_index_and_count()
    if count == 1:
        return Group.of([])
    _calls[name] += 1
    question = f"{name}/{_calls[name]}"
    publish(f"agreement/{question}/{own}", own_value)
    barrier(f"agreement: {name}", timeout_seconds)
    if own == 0:
        values = published(f"agreement/{question}")
        found = Group.of(
            process for process in range(count) if values.get(str(process)) != own_value
        )
        publish(f"differing/{question}", json.dumps(found))
        return found
    answer = await_published(f"differing/{question}", timeout_seconds)
    if answer is None:
        raise MissingProcessesError(f"{name}: process 0 does not say whether all agree", [0])
    return Group.parsed(json.loads(answer))
