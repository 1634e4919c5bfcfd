"""Outliers among the rates of things that should be alike: those too low to be chance."""

import statistics
from collections.abc import Mapping
from typing import TypeVar

FLOOR = 0.15
"""Share below the others within which a rate is never called slow."""

_SCALE = 1.4826  # of a normal distribution the standard deviation over the median absolute one
_SCORE = 3.5

Key = TypeVar("Key")


def slow_ones(rates: Mapping[Key, float], floor: float = FLOOR) -> list[Key]:
    """Return the keys whose rate is far below the others'; [] if there is nothing to compare with.

    Each rate is compared with the median of all *others*. A slow rate lies below this median by
    more than `floor` of it, and by more than 3.5 median absolute deviations. The deviations are
    scaled to a normal distribution's (Iglewicz and Hoaglin 1993, "How to Detect and Handle
    Outliers"). Since a rate is not compared with itself, one of two, or one half of all, can be
    found slow too.
    """
    found = []
    for key, rate in rates.items():
        others = [other for name, other in rates.items() if name != key]
        if not others:
            return []
        middle = statistics.median(others)
        deviation = _SCALE * statistics.median(abs(other - middle) for other in others)
        if middle - rate > max(floor * middle, _SCORE * deviation):
            found.append(key)
    return found
