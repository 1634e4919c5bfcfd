"""When one process of several ends with an error or falls silent, the others end too, in one line.

Left alone they would wait in a collective or a barrier until JAX's heartbeat timeout aborts them,
and a failed process itself would wait at its exit for a common shutdown that cannot happen.

Everyone renews a sign of life in the key-value store, which process 0 holds. Process 0 looks for
those who fall silent; the others notice when the store no longer answers.
"""

import contextlib
import itertools
import os
import sys
import threading
import time

import jax

from geojax.runtime.coordination import describe, publish, published
from geojax.runtime.internals import coordination_client
from geojax.runtime.last_words import ending_because, lost_contact

_POLL_SECONDS = 2.0
# A process that was killed can leave the others in a barrier that nothing breaks. JAX would abort
# them after 100 seconds of silence, with a stack trace; this is well before.
_SILENCE_SECONDS = 40.0
_over = threading.Event()


class _Contact:
    """When the key-value store answered this process the last time."""

    def __init__(self) -> None:
        self.latest = time.monotonic()


def abandon(message: str, exit_code: int) -> None:
    """End this process with `exit_code`, and tell the others why; they end with the same code.

    For an error after `start`, when the others go on. Print the message before: this returns only
    in a job of one process, where there is nothing to do, and in others ends the process without
    Python's clean-up.
    """
    if coordination_client() is None:
        return
    _over.set()
    with contextlib.suppress(Exception):
        publish(f"abandoned/{jax.process_index()}", f"{exit_code} {message}")
    if jax.process_index() == 0:
        time.sleep(2 * _POLL_SECONDS)  # the others read the message from this process
    with contextlib.suppress(OSError):  # nobody may be listening any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def watch_peers() -> None:
    """From now on end this process when another abandons the job; `start` calls it."""
    _over.clear()
    contact = _Contact()
    threading.Thread(target=_watch, args=(contact,), name="geojax peers", daemon=True).start()
    if jax.process_index() != 0:
        # On its own: a question over a link that was cut has no answer, and no end.
        watch = threading.Thread(target=_watch_contact, args=(contact,), name="geojax contact")
        watch.daemon = True
        watch.start()


def stop_watching_peers() -> None:
    """The job ends in good order; `finish` calls it."""
    _over.set()


def _watch(contact: _Contact) -> None:
    own = jax.process_index()
    silent = _Silence(jax.process_count())
    for beat in itertools.count():
        if _over.wait(_POLL_SECONDS):
            return
        try:
            abandoned = published("abandoned")
            publish(f"alive/{own}", str(beat))
            missing = silent.processes(published("alive"), time.monotonic()) if own == 0 else []
        except Exception as error:
            if own != 0 and not _over.is_set():
                _give_up([0], f"(it coordinates the run) does not answer ({_reason(error)})")
            return
        contact.latest = time.monotonic()
        abandoned.pop(str(own), None)
        if _over.is_set():
            return
        if abandoned:
            process, note = min(abandoned.items())
            exit_code, _, message = note.partition(" ")
            _say(ending_because(describe([int(process)]), message))
            if own == 0:
                time.sleep(2 * _POLL_SECONDS)
            os._exit(int(exit_code))
        if missing:
            _give_up(missing, f"gave no sign of life for {_SILENCE_SECONDS:g} seconds")


def _watch_contact(contact: _Contact) -> None:
    while not _over.wait(_POLL_SECONDS):
        if time.monotonic() - contact.latest > _SILENCE_SECONDS:
            _give_up(
                [0], f"(it coordinates the run) did not answer for {_SILENCE_SECONDS:g} seconds"
            )


def _give_up(processes: list[int], what: str) -> None:
    message = lost_contact(f": {describe(processes)} {what}")
    _say(f"error: {message}")
    if processes == [0]:
        os._exit(1)  # there is nobody to tell
    abandon(message, exit_code=1)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Silence:
    """Since when each process has not renewed its sign of life."""

    def __init__(self, count: int):
        self._newest: list[tuple[str | None, float | None]] = [(None, None)] * count

    def processes(self, signs: dict[str, str], now: float) -> list[int]:
        """The processes that have been silent too long; `signs` is what each last published."""
        for process, (newest, _) in enumerate(self._newest):
            sign = signs.get(str(process))
            if sign is not None and sign != newest:
                self._newest[process] = (sign, now)
        return [
            process
            for process, (_, since) in enumerate(self._newest)
            if since is not None and now - since > _SILENCE_SECONDS
        ]


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"geojax: {message}", file=sys.stderr, flush=True)
