"""Texts between the first process of a job and each of its others, in order and soon.

They go through the key-value store of JAX's coordination service, whose server is in the first
process: what that sends is written once, however many processes read it.
"""

import itertools
import queue
import threading
import time
from collections.abc import Iterator

from geojax.runtime.jax_private import process_index_and_count
from geojax.runtime.key_value_store import await_published, discard, publish
from geojax.runtime.liveness.lost_contact import translate_collective_errors

_SLICE_SECONDS = 5.0
"""Time of one request for a text that is not there yet."""
_PAUSE_SECONDS = 0.05
_KEPT = 4096
"""Newest texts of the first process that stay in the store; a thread reads each as it comes."""


class ProcessChannel:
    """This process's end; in a job of one process nobody is at the other.

    Args:
        name: subject of the texts, which no other channel of the job has.
    """

    def __init__(self, name: str):
        self.own, count = process_index_and_count()
        self.others: tuple[int, ...] = tuple(range(1, count)) if self.own == 0 else (0,)
        """The processes at the other end."""
        self._name, self._sent = name, 0
        self._came: queue.SimpleQueue[tuple[int, str] | Exception] = queue.SimpleQueue()
        self._closed = threading.Event()
        for sender in self.others:
            threading.Thread(
                target=self._listen, args=(sender,), name="geojax channel", daemon=True
            ).start()

    def send(self, text: str) -> None:
        """Send a text: the first process to all others, another one to the first."""
        if not self.others:
            return
        self._sent += 1
        with translate_collective_errors():
            publish(self._key(self.own, self._sent), text)
            if self.own == 0 and self._sent > _KEPT:
                discard(self._key(0, self._sent - _KEPT))

    def received(self) -> Iterator[tuple[int, str]]:
        """Yield the texts that have come, each with its sender.

        Raises:
            LostContactError: the processes cannot reach each other any more.
        """
        while not self._came.empty():
            came = self._came.get()
            if isinstance(came, Exception):
                with translate_collective_errors():
                    raise came
            yield came

    def close(self) -> None:
        """Read nothing any more."""
        self._closed.set()

    def _key(self, sender: int, number: int) -> str:
        return f"channel/{self._name}/{sender}/{number}"

    def _listen(self, sender: int) -> None:
        try:
            for number in itertools.count(1):
                key = self._key(sender, number)
                while (text := await_published(key, _SLICE_SECONDS)) is None:
                    if self._closed.is_set():
                        return
                    time.sleep(_PAUSE_SECONDS)  # a stranger may have written there
                self._came.put((sender, text))
                if self.own == 0:
                    discard(key)
        except Exception as error:
            if not self._closed.is_set():
                self._came.put(error)
