"""Every process of a job renews a sign of life in the key-value store; here they are read.

No clocks of different machines are compared: a sign is a count, and a process whose count stands
still is silent.
"""

import threading
import time

from geojax.runtime.jax_private import place_in_job
from geojax.runtime.key_value_store import publish, published

LONGEST_BEAT_SECONDS = 2.0
"""A process renews its sign at least so often."""

# While this process has renewed its own sign so often, each living one has renewed its own.
_OWN_BEATS = 3
_ASK_SECONDS = 0.5
# For as many beats on a busy machine, over a long link.
_PATIENCE_SECONDS = 5 * LONGEST_BEAT_SECONDS


def give_sign(beat: int) -> None:
    """Renew the sign of this process; `beat` is another number each time."""
    own, _ = place_in_job()
    publish(f"alive/{own}", str(beat))


def signs() -> dict[str, str]:
    """The newest sign of each process that has given one."""
    return published("alive")


class Silence:
    """Since when each process has not renewed its sign of life."""

    def __init__(self, count: int, limit_seconds: float, now: float):
        """The job begins `now`: whoever gives no sign at all is silent from then on."""
        self._limit_seconds = limit_seconds
        self._newest: list[tuple[str | None, float]] = [(None, now)] * count

    def processes(self, signs: dict[str, str], now: float) -> list[int]:
        """The processes that have been silent too long; `signs` is what each last published."""
        for process, (newest, _) in enumerate(self._newest):
            sign = signs.get(str(process))
            if sign != newest:
                self._newest[process] = (sign, now)
        return [
            process
            for process, (_, since) in enumerate(self._newest)
            if now - since > self._limit_seconds
        ]


def silent_now() -> list[int]:
    """The processes that renew their sign no more, found by waiting for all others to do so.

    It takes no longer than that, about 5 s where somebody is silent and 10 s at most. Nobody is
    named where this process gives no signs itself, as without `geojax.runtime.start`.
    """
    own, count = place_in_job()
    # The store may not answer, and then there is no end to the question.
    found: list[list[int]] = [[0] if own else []]
    asking = threading.Thread(target=lambda: found.append(_silent(own, count)), daemon=True)
    asking.start()
    asking.join(_PATIENCE_SECONDS)
    return found[-1]


def _silent(own: int, count: int) -> list[int]:
    try:
        before = now = signs()
        if str(own) not in before:
            return []
        silent, own_beats = [str(process) for process in range(count) if process != own], 0
        while silent and own_beats < _OWN_BEATS:
            time.sleep(_ASK_SECONDS)
            previous, now = now, signs()
            own_beats += now[str(own)] != previous[str(own)]
            silent = [process for process in silent if now.get(process) == before.get(process)]
    except Exception:  # of JAX's client, which cannot reach process 0
        return [0] if own else []
    return [int(process) for process in silent]
