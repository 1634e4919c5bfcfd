"""Threads that wait until offers are computed, one for each set of devices.

A set of devices computes in the order in which programs are dispatched, so that offers are computed
in the order in which they are made. Stages that share a process do not wait for each other.

Nothing that a thread waits for comes from another site, so that each wait ends with the program.
"""

import queue
import threading
from collections.abc import Callable, Sequence

import jax

_END_SECONDS = 5.0
"""Longest wait at the end for what is still computed."""


_Offer = tuple[Sequence[jax.Array], Callable[[Sequence[jax.Array]], None], Callable[[str], None]]


class Departures:
    """Threads that are started when they are needed."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._offers: dict[frozenset[jax.Device], queue.SimpleQueue[_Offer | None]] = {}
        self._threads: list[threading.Thread] = []

    def watch(
        self,
        shards: Sequence[jax.Array],
        depart: Callable[[Sequence[jax.Array]], None],
        failed: Callable[[str], None],
    ) -> None:
        """Wait in a thread until shards are computed.

        Args:
            shards: arrays of one device each.
            depart: called with the shards when they are computed.
            failed: called with the reason if they never will be.
        """
        devices = frozenset(device for shard in shards for device in shard.devices())
        if (offers := self._offers.get(devices)) is None:
            offers = self._offers[devices] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._run, args=(offers,), name="geojax departures", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        offers.put((shards, depart, failed))

    def close(self) -> None:
        """End the threads; what they have not seen computed does not depart."""
        self._closed.set()
        for offers in self._offers.values():
            offers.put(None)
        for thread in self._threads:
            thread.join(_END_SECONDS)

    def _run(self, offers: queue.SimpleQueue[_Offer | None]) -> None:
        while (offer := offers.get()) is not None:
            if not self._closed.is_set():
                _see(*offer)
            del offer  # while it waits for the next one, it keeps no arrays of this one alive


def _see(
    shards: Sequence[jax.Array],
    depart: Callable[[Sequence[jax.Array]], None],
    failed: Callable[[str], None],
) -> None:
    try:
        jax.block_until_ready(shards)
        depart(shards)
    except (RuntimeError, ValueError) as error:
        failed(str(error).partition("\n")[0])
