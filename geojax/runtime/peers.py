"""When one process of several ends with an error, the others hear of it and end too, in one line.

Left alone they would wait in a collective until JAX's heartbeat timeout aborts them, and the failed
process itself would wait at its exit for a common shutdown that cannot happen.
"""

import contextlib
import os
import sys
import threading
import time

import jax

from geojax.runtime.coordination import describe, publish, published
from geojax.runtime.internals import coordination_client

_POLL_SECONDS = 2.0
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
    with contextlib.suppress(Exception):
        publish(f"abandoned/{jax.process_index()}", f"{exit_code} {message}")
    if jax.process_index() == 0:
        time.sleep(2 * _POLL_SECONDS)  # the others read the message from this process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def watch_peers() -> None:
    """From now on end this process when another abandons the job; `start` calls it."""
    _over.clear()
    threading.Thread(target=_watch, name="geojax peers", daemon=True).start()


def stop_watching_peers() -> None:
    """The job ends in good order; `finish` calls it."""
    _over.set()


def _watch() -> None:
    own = str(jax.process_index())
    while not _over.wait(_POLL_SECONDS):
        try:
            abandoned = published("abandoned")
        except Exception:  # process 0 is gone, which JAX deals with
            return
        abandoned.pop(own, None)
        if abandoned and not _over.is_set():
            process, note = min(abandoned.items())
            exit_code, _, message = note.partition(" ")
            print(
                f"geojax: ending, because {describe([int(process)])} ended: {message}",
                file=sys.stderr,
                flush=True,
            )
            if own == "0":
                time.sleep(2 * _POLL_SECONDS)
            os._exit(int(exit_code))
