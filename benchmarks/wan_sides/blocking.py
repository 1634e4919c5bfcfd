"""A transport whose receives block, for islands whose hops are not hidden."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from geojax.transport import Fetch, MessageKey, Transport


class BlockingReceives:
    """A transport that asks for a message when nothing is left to compute without it.

    A pull asks the sender, which answers: a hop takes a round trip in front of what needs it, as a
    rendezvous does whose receive is posted late. Offers wait for nobody.
    """

    def __init__(self, transport: Transport):
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def fetch(
        self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]
    ) -> "_LateFetch":
        return _LateFetch(functools.partial(self._transport.fetch, sender, key, like))


class _LateFetch:
    """A fetch that begins when its result is asked for."""

    def __init__(self, begin: Callable[[], Fetch]):
        self.arrival: float | None = None
        self._begin = begin

    def arrived(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return False

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        fetch = self._begin()
        arrays = fetch.result(timeout_seconds)
        self.arrival = fetch.arrival
        return arrays
