"""Values of steps in a bounded number of points, and their median."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_MOST_CURVES = 256
_LONG_CURVE = 50
"""Points of a curve whose first tenth is left out of the range to show."""


class CurvePoint(NamedTuple):
    """Some neighboring steps as one point."""

    step: float
    """Mean of the steps."""
    mean: float
    low: float
    high: float


_Bucket = list[float]
"""Count, sum of steps, sum of values, least and largest value of some neighboring steps."""


def _merge(bucket: _Bucket, other: _Bucket) -> None:
    """Add the values of another bucket to a bucket."""
    for place in range(3):
        bucket[place] += other[place]
    bucket[3], bucket[4] = min(bucket[3], other[3]), max(bucket[4], other[4])


def _point(bucket: _Bucket) -> CurvePoint:
    count, steps, total, low, high = bucket
    return CurvePoint(steps / count, total / count, low, high)


class Curves:
    """Named curves over steps, each of up to a number of points.

    All curves have the same width of a bucket. It doubles when steps outgrow the number of points.
    """

    def __init__(self, points: int) -> None:
        self._most = points
        self._width = 1
        self._curves: dict[str, dict[int, _Bucket]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step; names beyond 256 are left out."""
        while step // self._width >= self._most:
            self._double()
        index = step // self._width
        for name, value in values.items():
            curve = self._curves.get(name)
            if curve is None:
                if len(self._curves) >= _MOST_CURVES:
                    continue
                curve = self._curves[name] = {}
            bucket = curve.get(index)
            if bucket is None:
                curve[index] = [1, step, value, value, value]
                continue
            # Written out: a long run has millions of values.
            bucket[0] += 1
            bucket[1] += step
            bucket[2] += value
            if value < bucket[3]:
                bucket[3] = value
            if value > bucket[4]:
                bucket[4] = value

    def _double(self) -> None:
        self._width *= 2
        for name, curve in self._curves.items():
            merged: dict[int, _Bucket] = {}
            for index, bucket in curve.items():
                if (earlier := merged.get(index // 2)) is None:
                    merged[index // 2] = bucket
                else:
                    _merge(earlier, bucket)
            self._curves[name] = merged

    @property
    def names(self) -> Sequence[str]:
        """Names of the curves, in the order of their first values."""
        return tuple(self._curves)

    def points(self, name: str) -> list[CurvePoint]:
        """Return a curve's points by step; none for a name without values."""
        curve = self._curves.get(name, {})
        return [_point(curve[index]) for index in sorted(curve)]

    def mean(self, name: str) -> float | None:
        """Return the mean over all steps; None: there are no values."""
        buckets = self._curves.get(name, {}).values()
        count = sum(bucket[0] for bucket in buckets)
        return sum(bucket[2] for bucket in buckets) / count if count else None

    def paired(self, names: Iterable[str]) -> list[tuple[float, dict[str, float]]]:
        """Return the steps of all buckets with the means of several curves there."""
        curves = {name: self._curves[name] for name in names if name in self._curves}
        indices = sorted(set().union(*curves.values())) if curves else []
        found = []
        for index in indices:
            points = {
                name: _point(curve[index]) for name, curve in curves.items() if index in curve
            }
            step = next(iter(points.values())).step
            found.append((step, {name: point.mean for name, point in points.items()}))
        return found


def shown_range(curves: Iterable[Sequence[float]]) -> tuple[float, float] | None:
    """Return the least and the largest value to show; None: there are none.

    A curve's first tenth does not count, in which a loss falls steeply.
    """
    values: list[float] = []
    for curve in curves:
        values += curve[len(curve) // 10 if len(curve) >= _LONG_CURVE else 0 :]
    if not values:
        return None
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


class ThinnedValues:
    """Values in their order, of which every second is dropped when they are too many."""

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._stride, self._seen = 1, 0
        self._values = array("d")

    def add(self, value: float) -> None:
        """Add a value."""
        if self._seen % self._stride == 0:
            self._values.append(value)
            if len(self._values) >= self._most:
                self._values = self._values[::2]
                self._stride *= 2
        self._seen += 1

    def quantile(self, share: float) -> float | None:
        """Return the value below which a share of the values lies; None: there are none."""
        if not self._values:
            return None
        ordered = sorted(self._values)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def median(self) -> float | None:
        """The median; None: there are no values."""
        return self.quantile(0.5)
