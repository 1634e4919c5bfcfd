"""Smoothed curves."""

import math
from collections.abc import Sequence


def smooth(values: Sequence[float]) -> list[float]:
    """Average exponentially over about a fiftieth of the values, on both sides of each."""
    decay = math.exp(-1 / max(1.0, len(values) / 100))
    backwards = _averages([*reversed(values)], decay)
    both = zip(_averages(values, decay), reversed(backwards), strict=True)
    return [(before + after) / 2 for before, after in both]


def _averages(values: Sequence[float], decay: float) -> list[float]:
    """Average the values up to each exponentially, unbiased at their start."""
    average, weight, averages = 0.0, 0.0, []
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        averages.append(average / weight)
    return averages
