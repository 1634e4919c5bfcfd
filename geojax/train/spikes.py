"""Spikes of a run's loss and gradient norm: values far above those of the steps before."""

import collections
import math
import statistics

_STEPS = 100
"""Steps that a value is compared with."""
_LEAST_STEPS = 20
_DEVIATIONS = 6.0
_LEAST_RATIO = 1.2
_TO_DEVIATION = 1.4826
"""Standard deviation of normal numbers, in units of their median absolute deviation."""


class SpikeDetector:
    """Notices values that lie far above the median of the last steps."""

    def __init__(self) -> None:
        self._values: collections.deque[float] = collections.deque(maxlen=_STEPS)

    def is_spike(self, value: float) -> float | None:
        """Take the value of a step.

        Returns:
            The median of the steps before, if the value is a spike; else None.
        """
        median = None
        if len(self._values) >= _LEAST_STEPS:
            middle = statistics.median(self._values)
            deviation = _TO_DEVIATION * statistics.median(
                abs(each - middle) for each in self._values
            )
            limit = max(middle + _DEVIATIONS * deviation, _LEAST_RATIO * middle)
            if not value <= limit:
                median = middle
        if math.isfinite(value):
            self._values.append(value)
        return median
