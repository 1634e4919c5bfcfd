"""Agreement of all processes of a job on what each of them, or the first one, finds out."""

import collections
import json
from collections.abc import Callable
from typing import Protocol

from geojax.errors import MissingProcessesError, RunError, UserError
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


def told_by_first(name: str, ask: Callable[[], str], timeout_seconds: float) -> str:
    """Return what process 0 gets by `ask`, or raise its error, in every process.

    All processes call it, equally often for a name.

    Raises:
        UserError: `ask` has raised one.
        RunError: the same.
        MissingProcessesError: process 0 did not say within `timeout_seconds`.
    """
    own, count = process_index_and_count()
    if count == 1:
        return ask()
    if own > 0:
        answer, error, is_input = json.loads(value_of_first(name, "", timeout_seconds))
        if error is not None:
            raise UserError(error) if is_input else RunError(error)
        return str(answer)
    try:
        answer = ask()
    except (UserError, RunError) as error:
        is_input = isinstance(error, UserError)
        value_of_first(name, json.dumps([None, str(error), is_input]), timeout_seconds)
        raise
    value_of_first(name, json.dumps([answer, None, False]), timeout_seconds)
    return answer


def values_at_first(name: str, own_value: str, timeout_seconds: float) -> list[str]:
    """Return the value called `name` of every process, by its index; in process 0 alone, else [].

    All processes call it, equally often for a name.

    Raises:
        MissingProcessesError: some process did not arrive within `timeout_seconds`; it is named.
    """
    own, count = process_index_and_count()
    if count == 1:
        return [own_value]
    _calls[name] += 1
    question = f"{name}/{_calls[name]}"
    publish(f"agreement/{question}/{own}", own_value)
    barrier(f"agreement: {name}", timeout_seconds)
    if own > 0:
        return []
    values = published(f"agreement/{question}")
    return [values.get(str(process), "") for process in range(count)]


def processes_that_differ(name: str, own_value: str, timeout_seconds: float) -> Group:
    """Return the processes in which the value called `name` is another than in process 0.

    All processes call it, equally often for a name, and get the same answer; process 0 compares. In
    a job of one process nobody differs.

    Raises:
        MissingProcessesError: some process did not arrive within `timeout_seconds`; it is named.
    """
    values = values_at_first(name, own_value, timeout_seconds)
    differing = [process for process, value in enumerate(values) if value != own_value]
    found = json.dumps(Group.of(differing))
    return Group.parsed(json.loads(value_of_first(f"{name} differs", found, timeout_seconds)))


class Talk(Protocol):
    """The ways in which all processes of a job find out something together."""

    def told_by_first(self, name: str, ask: Callable[[], str], timeout_seconds: float) -> str:
        """Do as the function of this name does."""
        ...

    def values_at_first(self, name: str, own_value: str, timeout_seconds: float) -> list[str]:
        """Do as the function of this name does."""
        ...
