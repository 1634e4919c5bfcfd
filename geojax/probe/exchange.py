"""What the processes of a probe tell each other: through the key-value store, never by collectives,
which may be what is broken."""

import collections
import time
from collections.abc import Iterator

import jax

from geojax.runtime import MissingProcessesError, barrier, describe
from geojax.runtime.key_value_store import publish, published

PATIENCE_SECONDS = 80.0
"""How long processes wait for each other beyond the time that a check takes: less than JAX takes to
end those that wait for one that is stuck, without a word of who that is."""

_POLL_SECONDS = 0.02
_questions: collections.Counter[str] = collections.Counter()


def collect(name: str, own: str, timeout_seconds: float = PATIENCE_SECONDS) -> list[str]:
    """What each process passed as `own` to the call of this name, in the order of their indices.

    Raises:
        MissingProcessesError: some process did not come within `timeout_seconds`; it names them.
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
    """What process `sender` publishes under probe/`key`.

    Raises:
        MissingProcessesError: it did not within `timeout_seconds`.
    """
    folder, _, name = f"probe/{key}".rpartition("/")
    deadline = time.monotonic() + timeout_seconds
    while name not in (notes := published(folder)):
        if time.monotonic() > deadline:
            raise MissingProcessesError(
                f"{describe([sender])} did not say '{key}' within {timeout_seconds:g} seconds",
                [sender],
            )
        time.sleep(_POLL_SECONDS)
    return notes[name]


def turns(name: str, own: int, count: int) -> Iterator[None]:
    """Yield once, when it is the turn of number `own` of `count`, while the other processes wait.

    Every process must exhaust it. Processes with the same number go at the same time.

    Raises:
        MissingProcessesError: some process did not come to its turn.
    """
    for turn in range(count):
        if turn == own:
            yield
        if count > 1:
            barrier(f"probe: {name}", PATIENCE_SECONDS)
