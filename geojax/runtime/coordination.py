"""Barriers outside of collectives, and the words for processes that did not come or went away.

All of it goes through JAX's coordination service, in process 0, and none of it needs a device. In a
job of one process everything returns at once.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.errors

from geojax.errors import LostContactError, RunError
from geojax.runtime.exit_messages import lost_contact
from geojax.runtime.heartbeat import silent_now
from geojax.runtime.jax_private import coordination_client
from geojax.runtime.key_value_store import publish, published

saying_lost_contact = threading.Lock()
"""Taken for good by the first thread that finds another process gone: it says so and ends this."""

HAND_OVER_SECONDS = 5.0
"""How long other threads give it."""

_known: dict[int, tuple[str | None, str]] = {}
_meetings: collections.Counter[str] = collections.Counter()


class MissingProcessesError(RunError):
    """Some processes did not come, which another try may cure; `missing` holds their indices."""

    def __init__(self, message: str, missing: Sequence[int]):
        super().__init__(message)
        self.missing = tuple(missing)


def know_processes(sites: Sequence[str | None], hosts: Sequence[str]) -> None:
    """Remember the site and the host of each process, so that messages can say it."""
    _known.clear()
    _known.update(enumerate(zip(sites, hosts, strict=True)))


def describe(processes: Iterable[int]) -> str:
    """For a message: "process 1 (site west, host n17) and process 3"."""
    return " and ".join(_description(process) for process in processes)


@contextlib.contextmanager
def naming_lost_contact() -> Iterator[None]:
    """What JAX says inside when a collective or a barrier breaks, as what it means.

    JAX says that a connection closed, and not whose: whoever gives no sign of life in the seconds
    that follow is named.

    Raises:
        LostContactError: instead of JAX's error, in a job of several processes.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or "RESOURCE_EXHAUSTED" in str(error):
            raise
        silent = silent_now()
        if not saying_lost_contact.acquire(blocking=False):
            time.sleep(HAND_OVER_SECONDS)
        who = f": {describe(silent)} gave no sign of life any more" if silent else ""
        raise LostContactError(lost_contact(f"{who} ({first_line(error)})")) from error


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until every process of the job has come to the barrier called `name`.

    A name may be used again; the n-th call of one process meets the n-th call of the others.

    Raises:
        MissingProcessesError: some process did not come within `timeout_seconds`; it names them.
        LostContactError: the processes do not reach each other any more.
    """
    client = coordination_client()
    if client is None:
        return
    _meetings[name] += 1
    meeting = f"barrier/{name}/{_meetings[name]}"
    arrival = f"{meeting}/{jax.process_index()}"
    publish(arrival, "here")
    try:
        client.wait_at_barrier(f"geojax/{meeting}", int(timeout_seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            with naming_lost_contact():
                raise
        here = {int(process) for process in published(meeting)}
        missing = [process for process in range(jax.process_count()) if process not in here]
        who = describe(missing) or "a process (it came just after that)"
        raise MissingProcessesError(
            f"barrier '{name}': {who} did not come within {timeout_seconds:g} seconds", missing
        ) from None
    client.key_value_delete(f"geojax/{arrival}")


def first_line(error: Exception) -> str:
    """What an error says, without the details that follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _description(process: int) -> str:
    known = _known.get(process)
    if known is None:
        return f"process {process}"
    site, host = known
    return f"process {process} ({f'site {site}, ' if site else ''}host {host})"
