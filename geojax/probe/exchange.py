"""Messages between the processes of a probe, through the key-value store.

Collectives are not used: they may be what is broken.
"""

import collections
import time
from collections.abc import Iterator

import jax

from geojax.runtime import MissingProcessesError, barrier, describe
from geojax.runtime.key_value_store import publish, published

TIMEOUT_SECONDS = 80.0
"""Time that processes wait for each other beyond the duration of a check. It is less than the time
after which JAX ends those that wait for a stuck process, without naming it."""

_POLL_SECONDS = 0.02
_questions: collections.Counter[str] = collections.Counter()


def collect(name: str, own: str, timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """Gather `own` of every process, by process index; all call it with the same `name`.

    Raises:
        MissingProcessesError: some process did not arrive within `timeout_seconds`; it is named.
    """
    if jax.process_count() == 1:
        return [own]
    _questions[name] += 1
    folder = f"probe/{name}/{_questions[name]}"
    publish(f"{folder}/{jax.process_index()}", own)
    barrier(f"probe: {name}", timeout_seconds)
    answers = published(folder)
    return [answers[str(process)] for process in range(jax.process_count())]


def await_note(key: str, sender: int, timeout_seconds: float) -> str:
    """Wait for the note that process `sender` publishes under probe/`key`, and return it.

    Raises:
        MissingProcessesError: it published none within `timeout_seconds`.
    """
    folder, _, name = f"probe/{key}".rpartition("/")
    deadline = time.monotonic() + timeout_seconds
    while name not in (notes := published(folder)):
        if time.monotonic() > deadline:
            raise MissingProcessesError(
                f"{describe([sender])} did not publish '{key}' within {timeout_seconds:g} seconds",
                [sender],
            )
        time.sleep(_POLL_SECONDS)
    return notes[name]


def turns(name: str, own: int, count: int) -> Iterator[None]:
    """Yield once, when it is the turn of number `own` of `count`, while the other processes wait.

    Every process must exhaust it. Processes with the same number go at the same time.

    Raises:
        MissingProcessesError: some process did not arrive at its turn.
    """
    for turn in range(count):
        if turn == own:
            yield
        if count > 1:
            barrier(f"probe: {name}", TIMEOUT_SECONDS)
