"""Which of several rates, of things that should be alike, are too low to be chance."""

import statistics
from collections.abc import Mapping
from typing import TypeVar

FLOOR = 0.15
"""A rate within this share of what the others have is never called slow."""

_SCALE = 1.4826  # of a normal distribution the standard deviation over the median absolute one
_SCORE = 3.5

Key = TypeVar("Key")


def slow_ones(rates: Mapping[Key, float], floor: float = FLOOR) -> list[Key]:
    """The keys whose rate lies far below the others'; [] where there is nothing to compare with.

    Each rate is compared with the median of all *others*: slow is what lies below it by more than
    `floor` of it and by more than 3.5 of their median absolute deviations, scaled to a normal
    distribution's (Iglewicz and Hoaglin 1993, "How to Detect and Handle Outliers"). Since a rate
    does not count among its own witnesses, one of two, or one half of all, can be found slow too.
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
