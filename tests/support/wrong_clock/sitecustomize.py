"""Sets a process's wall clock by WRONG_CLOCK: seconds that it is ahead, and its rate.

It is for a folder of PYTHONPATH. Debian's libfaketime does not do: with it Python's `time.sleep`
fails, unless the monotonic clock is wrong too.
"""

import os
import time

_ahead, _rate = map(float, os.environ.get("WRONG_CLOCK", "0 1").split())
_began, _right = time.time(), time.time


def _wrong() -> float:
    return _began + _ahead + _rate * (_right() - _began)


time.time = _wrong
time.time_ns = lambda: int(1e9 * _wrong())
