"""When one process of several ends with an error or falls silent, the others end too, in one line.

Left alone they would wait in a collective or a barrier until JAX's heartbeat timeout aborts them,
and a failed process itself would wait at its exit for a common shutdown that cannot happen.

Everyone renews a sign of life in the key-value store, which process 0 holds, from the moment when
all have connected to it. Process 0 looks for those who fall silent; the others notice when it no
longer answers. Where process 0 ends without a word, its connections break, and JAX's client of the
store wants to abort: it is kept from that for the time that a line takes.
"""

import contextlib
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from geojax.runtime.coordination import (
    HAND_OVER_SECONDS,
    describe,
    first_line,
    saying_lost_contact,
)
from geojax.runtime.exit_messages import ending_because, lost_contact
from geojax.runtime.heartbeat import LONGEST_BEAT_SECONDS, Silence, give_sign, signs
from geojax.runtime.jax_private import (
    calling_when_service_is_lost,
    coordination_client,
    place_in_job,
)
from geojax.runtime.key_value_store import publish, published
from geojax.runtime.uncaught import before_abort

_BEATS_IN_SILENCE = 8
_CONNECT_SECONDS = 5.0
_COORDINATOR = ", which coordinates the run,"
_over = threading.Event()


def abandon(message: str, exit_code: int) -> None:
    """End this process with `exit_code`, and tell the others why; they end with the same code.

    For an error after `start`, when the others go on. Print the message before: this returns only
    in a job of one process, where there is nothing to do, and in others ends the process without
    Python's clean-up.
    """
    if coordination_client() is None:
        return
    _over.set()
    telling = threading.Thread(target=_tell_the_others, args=(message, exit_code), daemon=True)
    telling.start()
    telling.join(LONGEST_BEAT_SECONDS)  # nobody may be listening any more
    if place_in_job()[0] == 0:
        time.sleep(2 * LONGEST_BEAT_SECONDS)  # the others read the message from this process
    _exit(exit_code)


def watch_peers(silence_seconds: float) -> None:
    """From now on end this process when another abandons the job, or is silent for so long.

    `start` calls it. JAX's own heartbeat timeout has to be longer.
    """
    _over.clear()
    watch = _Watch(silence_seconds)
    watch.start(watch.read)
    if place_in_job()[0] != 0:
        # On its own: a question over a link that was cut has no answer, and no end.
        watch.start(watch.look_at_the_clock)


def stop_watching_peers() -> None:
    """The job ends in good order; `finish` calls it."""
    _over.set()


def speaking_when_coordinator_is_gone(
    coordinator: str,
) -> contextlib.AbstractContextManager[None]:
    """Inside, JAX connects this process, not process 0, to `coordinator`, host:port of process 0.

    Later, when process 0 is gone, this process says so in one line and ends, instead of JAX's
    stack trace and abort.
    """
    host, _, port = coordinator.rpartition(":")

    def act(_: object = None) -> None:
        if _over.is_set():
            return
        if not _answers(host.strip("[]"), int(port)):
            _give_up([0], f"{_COORDINATOR} does not answer any more")
        # Something else is wrong, and what C++ says next tells what.

    if not before_abort(act):
        return contextlib.nullcontext()
    return calling_when_service_is_lost(act)


class _Watch:
    """What the threads beside the program know of the other processes."""

    def __init__(self, silence_seconds: float):
        self.silence_seconds = silence_seconds
        self.beat_seconds = min(LONGEST_BEAT_SECONDS, silence_seconds / _BEATS_IN_SILENCE)
        self.latest_answer = time.monotonic()

    def start(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=f"geojax {target.__name__}", daemon=True).start()

    def read(self) -> None:
        """Ask the store again and again for what the others say, and give a sign of life."""
        own, count = place_in_job()
        silence = Silence(count, self.silence_seconds, time.monotonic())
        for beat in itertools.count():
            try:
                give_sign(beat)
                abandoned = published("abandoned")
                missing = silence.processes(signs(), time.monotonic()) if own == 0 else []
            except Exception as error:
                if own != 0 and not _over.is_set():
                    _give_up([0], f"{_COORDINATOR} does not answer ({first_line(error)})")
                return
            self.latest_answer = time.monotonic()
            abandoned.pop(str(own), None)
            if _over.is_set():
                return
            if abandoned:
                process, note = min(abandoned.items())
                exit_code, _, message = note.partition(" ")
                _say(ending_because(describe([int(process)]), message))
                if own == 0:
                    time.sleep(2 * LONGEST_BEAT_SECONDS)
                _exit(int(exit_code))
            if missing:
                _give_up(missing, f" gave no sign of life for {self.silence_seconds:g} seconds")
            if _over.wait(self.beat_seconds):
                return

    def look_at_the_clock(self) -> None:
        """Notice that the store has not answered for too long."""
        while not _over.wait(self.beat_seconds):
            if time.monotonic() - self.latest_answer > self.silence_seconds:
                _give_up([0], f"{_COORDINATOR} did not answer for {self.silence_seconds:g} seconds")


def _tell_the_others(message: str, exit_code: int) -> None:
    with contextlib.suppress(Exception):
        publish(f"abandoned/{place_in_job()[0]}", f"{exit_code} {message}")


def _answers(host: str, port: int) -> bool:
    """Whether there is a server of gRPC, which speaks first (HTTP/2, RFC 9113, section 3.4)."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), _CONNECT_SECONDS) as connection,
    ):
        return connection.recv(1) != b""
    return False


def _give_up(processes: list[int], what: str) -> None:
    if not saying_lost_contact.acquire(blocking=False) and _over.wait(HAND_OVER_SECONDS):
        time.sleep(HAND_OVER_SECONDS)  # it tells the others
    message = lost_contact(f": {describe(processes)}{what}")
    _say(f"error: {message}")
    own, count = place_in_job()
    if processes == [0] or set(range(count)) == {own, *processes}:
        _exit(1)  # there is nobody to tell
    abandon(message, exit_code=1)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"geojax: {message}", file=sys.stderr, flush=True)


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody may be listening any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
